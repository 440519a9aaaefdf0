"""`neuronx_distributed.trainer.checkpoint`: checkpoints with NxD's folders and names, and Orbax inside.

    <path>/<tag>/checkpoint           written first
    <path>/<tag>/model/, optim/       full arrays (Orbax), whatever ranks held of them; tensors.json says what is there
    <path>/<tag>/scheduler.pt, user_content.pt, random/
    <path>/<tag>/done                 written last: without it a tag does not count

A checkpoint loads with any number of ranks in any layout.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxd_jax.checkpoint import contents, original, original_writing, reading, saving, tags, writing
from nxd_jax.checkpoint.storage import BaseCheckpointStorage, create_checkpoint_storage
from nxd_jax.tensor_parallel import parallel_groups
from torch_bridge.config.variables import VARIABLES
from torch_bridge.mesh import processes, world
from torch_bridge.runtime import executor

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("nxd_jax")


def save_checkpoint(
    path: Any = None,
    tag: Any = "",
    model: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    user_content: Any = None,
    num_workers: int = 8,
    use_xser: bool = False,
    num_kept_ckpts: int | None = None,
    async_save: bool = False,
    zero1_optimizer: bool = False,
    use_zero1_dcp: bool = False,
    avoid_saving_lower_precision_weights: bool = False,
    *,
    checkpoint_dir_str: Any = None,
    nxd_config: Any = None,
) -> None:
    """`neuronx_distributed.save_checkpoint`: write a model, an optimizer, a scheduler and anything picklable as one tag.

    path (NxD's code calls it checkpoint_dir_str): a directory, or an address that fsspec knows. tag: its name; None or "": `save_000001` and so on; one
    with a folder (`run/step_1`) loads by its name alone, and a warning says so.
    model: a module or a state dict; optimizer: an optimizer or its state dict. num_kept_ckpts: remove older tags beyond so many (None or -1: none).
    async_save: return as soon as the state is held; it is written, and marked complete, in the background; the training that follows changes nothing of it.
    Errors are raised by the next save, load or `finalize_checkpoint()`; a program waits at its end, and ends with status 120 if the last save failed.
    avoid_saving_lower_precision_weights: leave out weights whose master weights are in the optimizer's state. The random states of Python, numpy, torch and
    xla are saved too.

    With the environment's NXD_JAX_CHECKPOINT_FORMAT=original the folders of model and optimizer hold NxD's own files instead of full arrays: one for each of
    its ranks, with use_xser one for each tensor too. They load here all the same. Of a pipeline each rank's has what its own stages read; that needs the model
    and the optimizer themselves.

    num_workers, zero1_optimizer, use_zero1_dcp and nxd_config are accepted without effect, so is use_xser otherwise. All processes must call it. As in NxD,
    use_zero1_dcp raises AssertionError for a ZeRO-1 optimizer without async_save, and with avoid_saving_lower_precision_weights.

    A failed save (a full disk, no permission, FileExistsError for a tag that another process is saving) raises and leaves earlier tags as they were; so does a
    crash at any moment.
    """
    where = path if path is not None else checkpoint_dir_str
    storage = create_checkpoint_storage(where)
    _check_count(num_kept_ckpts)
    if model is None and optimizer is None and scheduler is None and user_content is None:
        raise ValueError("save_checkpoint has nothing to save: give model=, optimizer=, scheduler= or user_content=")
    if use_zero1_dcp:
        _check_dcp(optimizer, zero1_optimizer, async_save, avoid_saving_lower_precision_weights)
    saving.wait()
    tag = ("" if tag is None else str(tag)) or saving.next_tag(storage)
    tags.check(tag)
    _warn_of_folders(tag, storage.dirname())
    executor.sync()
    job = saving.Save(storage, tag, num_kept_ckpts)
    theirs = VARIABLES["NXD_JAX_CHECKPOINT_FORMAT"].now() == "original"
    if model is not None:
        covered = _with_master(optimizer, model) if avoid_saving_lower_precision_weights else set()
        job.items[writing.MODEL] = original_writing.model_files(model, use_xser, covered) if theirs else writing.model_item(model, covered)
    if optimizer is not None:
        job.items[writing.OPTIMIZER] = (
            original_writing.optimizer_files(optimizer, use_xser, model) if theirs else writing.optimizer_item(optimizer, model)
        )
    if scheduler is not None:
        job.files[writing.SCHEDULER] = writing.pickled(scheduler.state_dict())
    if user_content is not None:
        job.files[writing.USER] = writing.pickled(user_content)
    job.start(async_save)


def load_checkpoint(
    path: Any = None,
    tag: Any = None,
    model: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    num_workers: int = 8,
    strict: bool = True,
    use_zero1_dcp: bool = False,
    *,
    checkpoint_dir_str: Any = None,
    nxd_config: Any = None,
) -> Any:
    """`neuronx_distributed.load_checkpoint`: read a tag into what is given; returns the user content, or None.

    tag: None or "": the newest complete one. strict: names of model and checkpoint must agree. The layout of ranks, ZeRO-1 on or off, fused or
    separate q, k and v and the copies of K and V may differ from those it was saved with: each device reads its own part. With an optimizer or a
    scheduler, the random states are put back as well. Checkpoints of the original NxD load too. num_workers, use_zero1_dcp and nxd_config are accepted
    without effect. All processes must call it.

    Raises RuntimeError if there is no complete tag, or names or shapes differ; FileNotFoundError for a tag, or a part of it, that is not there; ValueError
    for an empty dict as model or optimizer; DamagedCheckpointError (a RuntimeError) for files that cannot be read.
    """
    storage = create_checkpoint_storage(path if path is not None else checkpoint_dir_str)
    folder = saving.fetch(storage, tag)
    started = time.perf_counter()
    if original.is_original(folder):
        content = original.load(folder, model, optimizer, scheduler, strict)
        if optimizer is not None or scheduler is not None:
            saving.restore_random(folder)
        processes.barrier("load_checkpoint")
        return content
    if model is not None:
        master = folder / writing.OPTIMIZER
        reading.load_model(saving.part(folder, writing.MODEL, "model"), model, strict, master)
    if optimizer is not None:
        reading.load_optimizer(saving.part(folder, writing.OPTIMIZER, "optimizer"), optimizer, model)
    if scheduler is not None:
        scheduler.load_state_dict(reading.load_object(saving.part(folder, writing.SCHEDULER, "scheduler")))
    content = reading.load_object(folder / writing.USER) if (folder / writing.USER).exists() else None
    if optimizer is not None or scheduler is not None:
        saving.restore_random(folder)
    processes.barrier("load_checkpoint")
    if world.current().first_here:
        logger.info("loaded %s from %s in %.1f s", folder.name, storage.dirname(), time.perf_counter() - started)
    return content


def has_checkpoint(path: Any = None, *, checkpoint_dir_str: Any = None) -> bool:
    """`neuronx_distributed.has_checkpoint`: whether a directory has a complete tag."""
    return bool(create_checkpoint_storage(path if path is not None else checkpoint_dir_str).completed_tags())


def finalize_checkpoint() -> None:
    """`neuronx_distributed.finalize_checkpoint`: wait for saves in the background. Raises what went wrong in them."""
    saving.wait()


def _get_path(prefix: str, tp: bool = True, pp: bool = True, dp: bool = False, ep: bool = False) -> str:
    """`trainer.checkpoint._get_path`: how NxD names this rank's file below `prefix`, for scripts that write files of their own."""
    numbers = [("dp", parallel_groups.rank("dp") if dp else 0)]
    numbers += [("ep", parallel_groups.rank("ep"))] if ep else []
    numbers += [("tp", parallel_groups.rank("tp") if tp else 0)]
    numbers += [("pp", parallel_groups.rank("pp") if pp else 0)]
    return f"{prefix}/{'_'.join(f'{kind}_rank_{number:02d}' for kind, number in numbers)}.pt"


# -- what is saved ---------------------------------------------------------------------------------


def _warn_of_folders(tag: str, directory: str) -> None:
    """Tags are looked for among the folders of the directory, no deeper."""
    folder, _, name = os.path.normpath(tag).rpartition("/")
    if folder and world.current().first_here:
        logger.warning(
            "save_checkpoint(tag=%r): only load_checkpoint(tag=%r) finds this tag; the newest tag, has_checkpoint and num_kept_ckpts look into %s alone. "
            "Give path=%r and tag=%r for them to see it",
            tag,
            tag,
            directory,
            f"{directory.rstrip('/')}/{folder}",
            name,
        )


def _check_count(count: object) -> None:
    if count is None or count == -1:
        return
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"num_kept_ckpts must be a positive number, or None or -1 to keep all, got {count!r}")


def _check_dcp(optimizer: Any, zero1_optimizer: bool, async_save: bool, avoid_saving_lower_precision_weights: bool) -> None:
    assert not avoid_saving_lower_precision_weights, (
        "use_zero1_dcp and avoid_saving_lower_precision_weights exclude each other: give one of them"
    )
    zero1 = zero1_optimizer if isinstance(optimizer, dict) else optimizer is not None and contents.is_zero1(optimizer)
    assert async_save or not zero1, "use_zero1_dcp saves in the background only: give async_save=True too"


def _with_master(optimizer: Any, model: Any) -> set[str]:
    """Names of weights whose master weights will be in the optimizer's folder."""
    if optimizer is None or not contents.is_zero1(optimizer):
        raise ValueError(
            "avoid_saving_lower_precision_weights needs a ZeRO-1 optimizer, whose master weights stand in for the model's weights"
        )
    found = contents.of_optimizer(optimizer, contents.parts_of(optimizer, contents.names_of(model)))
    return set(found.other["master"])


# -- NxD's own state ---------------------------------------------------------------------------------


class CheckpointIOState:
    """`trainer.checkpoint.CheckpointIOState`: a tag written file by file, for scripts that use NxD's class themselves.

    async_save: in the background, in order.
    """

    def __init__(self, async_save: bool = False):
        self.async_save = async_save
        self._storage: BaseCheckpointStorage | None = None
        self._tag = ""
        self._folder: Path | None = None

    def begin(self, checkpoint: BaseCheckpointStorage, tag: str) -> None:
        """Begin a tag."""
        tags.check(tag)
        self.wait_all()
        self._storage, self._tag = checkpoint, tag
        self._folder = checkpoint.begin(tag)

    def add_save_task(self, obj: Any, filename: str) -> None:
        """Pickle an object into a file of the tag: `tag/name`, or its name within the tag."""
        if self._folder is None:
            raise RuntimeError("add_save_task needs begin(storage, tag) to be called first")
        data, target = writing.pickled(obj), self._folder / filename.removeprefix(f"{self._tag}/")

        def write() -> None:
            target.parent.mkdir(parents=True, exist_ok=True)
            writing.write_bytes(target, data)

        self._do(write)

    def end(self, num_kept: int | None = None) -> None:
        """Mark the tag as complete once its files are written, then remove old ones."""
        if self._storage is None or self._folder is None:
            raise RuntimeError("end needs begin(storage, tag) to be called first")
        storage, tag, folder = self._storage, self._tag, self._folder

        def finish() -> None:
            storage.commit(tag, folder)
            storage.retain(num_kept)

        self._do(finish)
        self._folder = None

    def submit_remove(self, num_kept: int | None = None, async_remove: bool = False, remove_tags: list[str] | None = None) -> None:
        """Remove tags: those named, or all but the `num_kept` newest."""
        storage = self._storage
        if storage is None:
            return
        task: Callable[[], Any] = lambda: storage.remove_tags(remove_tags) if remove_tags else storage.retain(num_kept)  # noqa: E731
        saving.submit(task) if async_remove else task()

    def wait_save(self, async_remove: bool = False) -> None:
        """Until files are written."""
        saving.wait()

    def wait_remove(self) -> None:
        """Until tags are removed."""
        saving.wait()

    def wait_all(self) -> None:
        """Until everything is done."""
        saving.wait()

    def finalize_shutdown(self) -> None:
        """Until everything is done."""
        saving.wait()

    def _do(self, task: Callable[[], Any]) -> None:
        saving.submit(task) if self.async_save else task()


_iostate: CheckpointIOState | None = None


def __getattr__(name: str) -> Any:
    """`trainer.checkpoint.g_iostate`: of the directory saved to last, once there has been a save."""
    global _iostate
    if name != "g_iostate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    last = saving.last()
    if last is not None:
        _iostate = _iostate or CheckpointIOState(last.in_background)
        _iostate._storage = last.storage
    return _iostate
