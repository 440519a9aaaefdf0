"""`neuronx_distributed.lightning.NeuronCheckpointIO`: Lightning's checkpoints as folders with full arrays, which any layout of ranks loads.

    epoch=0-step=100.ckpt/checkpoint, model/, optim/ (optim_1/ ...), scheduler.pt, user_content.pt, random/, done

are the files of `neuronx_distributed.save_checkpoint`, so `neuronx_distributed.load_checkpoint(folder, tag="epoch=0-step=100.ckpt", model=...)` and
`nxd-ckpt inspect` read them too; user_content.pt holds Lightning's own part (loops, callbacks, hyperparameters).
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.plugins.io import XLACheckpointIO

from nxd_jax.checkpoint import reading, saving, tags, writing
from nxd_jax.checkpoint.orbax_files import DamagedCheckpointError
from nxd_jax.checkpoint.storage import BaseCheckpointStorage, FilesysCheckpointStorage, create_checkpoint_storage
from nxd_jax.lightning._plain import plain
from nxd_jax.lightning.loaders import LOADERS, states_of_loaders
from nxd_jax.lightning.stored import LiveOptimizer, StoredOptimizer, StoredWeights
from nxd_jax.tensor_parallel import rank_files
from torch_bridge import nested
from torch_bridge.collectives import object_collectives
from torch_bridge.mesh import processes, world
from torch_bridge.runtime import executor

logger = logging.getLogger("nxd_jax")


class NeuronCheckpointIO(XLACheckpointIO):
    """`neuronx_distributed.lightning.NeuronCheckpointIO`: writes and reads folders. All processes call its methods.

    save_load_xser is accepted without effect: arrays are always written apart, by the device that holds them. weights_only: of a checkpoint's pickled
    files (hyperparameters, callbacks), read only what torch.load(weights_only=True) allows. async_save: return as soon as the state is held; writing, and
    the removal of older checkpoints, goes on in the background (`Trainer(plugins=[NeuronCheckpointIO(async_save=True)])`).

    Checkpoints that the original NxD wrote (a file or a folder of tensors per rank) are read by the same number of ranks in the same layout.
    """

    def __init__(self, save_load_xser: bool = True, weights_only: bool = False, async_save: bool = False):
        super().__init__()
        self.save_load_xser = save_load_xser
        self.weights_only = weights_only
        self.async_save = async_save
        self._last: tuple[BaseCheckpointStorage, str] | None = None

    # -- saving ---------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None, **_: Any) -> None:
        """Write what `Trainer.save_checkpoint` collected as the folder `path` (a path, or an address that fsspec knows).

        Raises TypeError for storage_options, NotADirectoryError where a file is, and whatever the disk says; an earlier checkpoint of this name stays until the
        new one is complete.
        """
        if storage_options is not None:
            raise TypeError(
                "Trainer.save_checkpoint(..., storage_options=...) is not supported by NeuronCheckpointIO: write to an address that fsspec knows (s3://...)"
            )
        storage, name = _parts(path)
        if (storage.root / name).is_file():
            raise NotADirectoryError(f"{storage.root / name} is a file, and checkpoints are folders: remove it or choose another path")
        executor.sync()
        job = saving.Save(storage, name)
        rest = dict(checkpoint)
        state = rest.pop("state_dict", None)
        if state is not None:
            job.items[writing.MODEL] = writing.model_item(state)
        for number, entry in enumerate(rest.pop("optimizer_states", ())):
            live = isinstance(entry, LiveOptimizer)
            job.items[_folder(number)] = writing.optimizer_item(entry.optimizer if live else entry, entry.module if live else None)
            rest["optimizers"] = number + 1
        schedulers = rest.pop("lr_schedulers", None)
        if schedulers is not None:
            rest["schedulers"] = len(schedulers)
            job.files[writing.SCHEDULER] = writing.pickled(schedulers[0] if len(schedulers) == 1 else schedulers)
        job.items.update(self._more_items(rest))
        job.own[LOADERS] = states_of_loaders(rest)
        job.files[writing.USER] = writing.pickled(_of_first_rank(plain(rest)))
        if self.async_save and isinstance(job.storage, FilesysCheckpointStorage) and world.process_index() == 0:
            (job.storage.root / job.tag).mkdir(
                parents=True, exist_ok=True
            )  # Lightning may link to it (save_last="link") before it is written
        self._last = storage, name
        job.start(self.async_save)

    def _more_items(self, rest: dict[str, Any]) -> dict[str, writing.Item]:
        """For subclasses: further folders of arrays, by name; what is in them is taken out of `rest`."""
        return {}

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, after the saves that are under way: at no moment is the last one gone before the next is complete. It stays if that failed."""
        storage, name = _parts(path)
        after = self._last
        if after is not None and (after[0].dirname(), after[1]) == (storage.dirname(), name):
            after = self._last = None

        def remove() -> None:
            if after is None or after[1] in after[0].completed_tags():
                storage.remove_tags([name])
            else:
                logger.warning("%s stays, because %s, saved after it, is not complete", path, after[1])

        if world.process_index() == 0:
            saving.then(remove)

    def teardown(self) -> None:
        """Wait for saves in the background. Raises what went wrong in them."""
        saving.wait()

    # -- loading --------------------------------------------------------------------------------------

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None, master_dp_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint as Lightning knows it. `state_dict` and `optimizer_states` are read from disk when they are needed.

        map_location, and master_dp_only (NxD's second argument: whether only data-parallel rank 0 wrote a file) are accepted without effect: the names of
        the files say it.

        Raises FileNotFoundError for what is not there or not complete, naming the complete ones; NotADirectoryError for a file; DamagedCheckpointError for
        files that cannot be read; ValueError for what weights_only does not allow.
        """
        storage, name = _parts(path)
        _check_place(storage.root / name)
        if (old := _of_original(storage, name)) is not None:
            return old
        folder = saving.fetch(storage, name)
        only = bool(self.weights_only if weights_only is None else weights_only)
        found: dict[str, Any] = _read(folder / writing.USER, only)
        found["nxd_folder"] = str(folder)
        if (folder / writing.MODEL).is_dir():
            found["state_dict"] = StoredWeights(folder / writing.MODEL, folder / writing.OPTIMIZER)
        count = found.pop("optimizers", None)
        if count is not None:
            found["optimizer_states"] = [StoredOptimizer(folder / _folder(k)) for k in range(count)]
        schedulers = found.pop("schedulers", None)
        if schedulers is not None:
            state = _read(folder / writing.SCHEDULER, only)
            found["lr_schedulers"] = [state] if schedulers == 1 else state
            found.setdefault("optimizer_states", [])
        return found


def _parts(path: Any) -> tuple[BaseCheckpointStorage, str]:
    """The storage of the directory that a checkpoint is in, and its name there."""
    where = os.fspath(path).rstrip("/")
    parent, _, name = where.rpartition("/")
    return create_checkpoint_storage(parent or ("/" if where.startswith("/") else ".")), name


def _check_place(place: Path) -> None:
    """Refuse what is no folder of ours with a word on what it is."""
    if place.is_file():
        raise NotADirectoryError(
            f"{place} is a file, and NeuronCheckpointIO reads folders as it writes them. What another strategy wrote is read with "
            "NeuronXLAStrategy(checkpoint_io=TorchCheckpointIO()), its weights by any layout of ranks"
        )
    within = tags.completed(place) if place.is_dir() and not (place / tags.DONE).exists() else []
    if within:
        raise FileNotFoundError(f"{place} is no checkpoint but holds some, pass one of them as ckpt_path: {', '.join(within[-8:])}")


def _read(path: Path, weights_only: bool) -> Any:
    try:
        return reading.load_object(path, weights_only=weights_only)
    except DamagedCheckpointError as error:
        refused = re.search(r"GLOBAL (\S+)", str(error.__cause__)) if weights_only else None
        if refused is None:
            raise
        raise ValueError(
            f"{path} holds {refused[1]}, which weights_only=True does not read: pass weights_only=False if you trust the checkpoint, or name the class in "
            "torch.serialization.add_safe_globals"
        ) from error


def _folder(number: int) -> str:
    """Of an optimizer."""
    return writing.OPTIMIZER if number == 0 else f"{writing.OPTIMIZER}_{number}"


def _of_first_rank(data: Any) -> Any:
    """Nested data with tensors on xla as the first hosted rank has them, on the CPU: what rank 0 alone would write."""
    tensors = nested.collect(data, _on_xla)
    if not tensors:
        return data
    return nested.replace(data, _on_xla, object_collectives.each_ranks(tensors)[0])


def _on_xla(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "xla"


# -- checkpoints of the original ---------------------------------------------------------------------


def _of_original(storage: BaseCheckpointStorage, name: str) -> dict[str, Any] | None:
    """A checkpoint that the original NxD wrote: one file, or one folder of tensors, for each rank."""
    folder = Path(storage.root) / name
    files = [f.name for f in folder.iterdir() if f.name.startswith("tp_rank_")] if folder.is_dir() else []
    if not files:
        return None
    processes.barrier("load_checkpoint")
    found: dict[str, Any] = rank_files.load(
        folder,
        load_xser=any(f.endswith(".tensors") for f in files),
        master_dp_only=not any("_dp_rank_" in f for f in files),
    )
    return found
