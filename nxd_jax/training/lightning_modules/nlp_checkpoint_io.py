"""`neuronx_distributed_training.lightning_modules.nlp_overrides.NLPCheckpointIO`: checkpoints of YAML workflows, also those that the original wrote."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig

from nxd_jax.checkpoint import original, original_files, original_states, reading, saving, tags, writing
from nxd_jax.checkpoint.original_optimizers import UnwrittenShardsError
from nxd_jax.checkpoint.savers import BEGUN
from nxd_jax.checkpoint.storage import BaseCheckpointStorage, FilesysCheckpointStorage, FsspecCheckpointStorage
from nxd_jax.lightning.checkpoint_io import NeuronCheckpointIO, _parts
from nxd_jax.lightning.stored import StoredOptimizer, StoredWeights
from nxd_jax.training.config.loading import plain
from nxd_jax.training.utils import resuming
from torch_bridge import nested

logger = logging.getLogger("nxd_jax")

AVERAGES = "ema"
"""Averages of weights (`utils.ema`), in a folder of their own."""

STATE_KEY = "NeMoModelCheckpoint"
"""Of the checkpoint callback's state; the original's has its options behind it."""

VERSION = "pytorch-lightning_version"
OPTIONAL = (".rotary_emb.inv_freq",)
"""Endings of names that the original does not ask for: they follow from the configuration."""


class NLPCheckpointIO(NeuronCheckpointIO):
    """`NLPCheckpointIO(async_save, weight_init_only, ptl_version)`: writes what `NeuronCheckpointIO` writes, under the path that it is given.

    weight_init_only: of a checkpoint that training begins with (`exp_manager.resume_from_checkpoint`) take the weights alone: steps, learning rates and the
    optimizer begin anew. A run's own checkpoints (those in `run_folder`, which `exp_manager` sets) are taken whole. ptl_version: the Lightning that a
    checkpoint is of, where it does not say.

    A run's checkpoints that hold adapters alone (LoRA with `save_lora_base: False`) are loaded on top of the weights that it began with, those of `base`
    (`exp_manager.resume_from_checkpoint`, which `exp_manager` sets).

    Checkpoints of the original NxD Training are read at any layout of ranks, xser or not: model/, optim/ and user_content.pt of a tag, or model/ alone, as
    its converter writes them.
    """

    def __init__(self, async_save: bool = False, weight_init_only: bool = False, ptl_version: str = "2.5.0", save_load_xser: bool = True):
        super().__init__(save_load_xser, async_save=bool(async_save))
        self.weight_init_only = bool(weight_init_only)
        self.ptl_version = ptl_version
        self.run_folder: str | None = None
        self.base: str | None = None

    def takes_weights_only(self, path: Any) -> bool:
        """Whether only the weights of a checkpoint are loaded."""
        return not self._is_own(path) and (self.weight_init_only or _has_model_alone(path))

    def _is_own(self, path: Any) -> bool:
        return self.run_folder is not None and resuming.lies_in(str(path), self.run_folder)

    # -- saving ---------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None, **_: Any) -> None:
        """`NeuronCheckpointIO.save_checkpoint`; what is OmegaConf's in the checkpoint is saved as plain dicts and lists."""
        arrays = ("state_dict", "optimizer_states", AVERAGES)
        rest = {k: v for k, v in checkpoint.items() if k not in arrays}
        found = nested.collect(rest, _is_config)
        rest = nested.replace(rest, _is_config, [plain(c) for c in found]) if found else rest
        super().save_checkpoint({**{k: checkpoint[k] for k in arrays if k in checkpoint}, **rest}, path, storage_options=storage_options)

    def _more_items(self, rest: dict[str, Any]) -> dict[str, writing.Item]:
        averages = rest.pop(AVERAGES, None)
        return {} if not averages else {AVERAGES: writing.model_item(averages)}

    # -- loading --------------------------------------------------------------------------------------

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None, master_dp_only: bool | None = None
    ) -> dict[str, Any]:
        """`NeuronCheckpointIO.load_checkpoint`, of the original's checkpoints too. Also raises FileNotFoundError for one of those that is not complete, and
        ValueError for adapters alone if it is not said which weights they belong to."""
        found = self._read(path, map_location, weights_only, master_dp_only)
        base = self._base_of(found, path)
        found.setdefault(VERSION, self.ptl_version)
        if isinstance(callbacks := found.get("callbacks"), dict):
            found["callbacks"] = {STATE_KEY if key.startswith(STATE_KEY) else key: state for key, state in callbacks.items()}
        if self.takes_weights_only(path) or "optimizer_states" not in found:
            logger.info("%s: its weights are loaded; steps, learning rates and the optimizer begin anew", path)
            found = {"state_dict": found["state_dict"], VERSION: found[VERSION], "optimizer_states": [_Unread()], "lr_schedulers": []}
        state = found.get("state_dict")
        if type(state) is StoredWeights:
            if (state.folder.parent / AVERAGES).is_dir() and "loops" in found:
                found[AVERAGES] = StoredWeights(state.folder.parent / AVERAGES, None)
            found["state_dict"] = _Explained(state, str(path))
        if base is not None:
            found["state_dict"] = _OnTop(found["state_dict"], self._read(base)["state_dict"])
            logger.info("%s holds adapters alone: the weights are those of %s", path, base)
        return found

    def _read(self, path: Any, *options: Any) -> dict[str, Any]:
        folder = _original_folder(path)
        return super().load_checkpoint(path, *options) if folder is None else self._of_nxdt(folder)

    def _base_of(self, found: dict[str, Any], path: Any) -> str | None:
        """The checkpoint with the weights that adapters alone belong to; None for checkpoints with weights, and for a run that began without any."""
        if not isinstance(found.get("state_dict"), Mapping) or not _adapters_alone(found["state_dict"]):
            return None
        if self._is_own(path) and self.base is not None:
            resuming.check_base(self.base)
            return self.base
        saved = found.get("hyper_parameters") or {}
        began: Any = plain(saved.get("cfg") or {})
        for key in ("exp_manager", "resume_from_checkpoint"):
            began = began.get(key) if isinstance(began, Mapping) else None
        if began:
            what = f"exp_manager.resume_from_checkpoint={began}"
            raise ValueError(
                f"{path} holds adapters alone (peft.save_lora_base: False), and the run that trained them began with the weights of {what}. "
                + (f"Say {what} again" if self._is_own(path) else "Begin with a checkpoint of peft.save_lora_base=True, which has both")
            )
        return None

    def _of_nxdt(self, folder: Path) -> dict[str, Any]:
        found = reading.load_object(folder / writing.USER) if (folder / writing.USER).is_file() else None
        result: dict[str, Any] = dict(found or {})
        weights = OriginalWeights(folder)
        result["state_dict"] = weights
        if original_files.find(folder).optimizer:
            result["optimizer_states"] = [OriginalOptimizer(folder, weights)]
            result.setdefault("lr_schedulers", [])
        return result


def _is_config(x: object) -> bool:
    return isinstance(x, (DictConfig, ListConfig))


def _original_folder(path: Any) -> Path | None:
    """A local folder with a checkpoint's files if the original wrote it."""
    storage, name = _parts(path)
    if isinstance(storage, FilesysCheckpointStorage):
        if not original.is_original(storage.root / name) or original.is_older(storage.root / name):
            return None
    elif not _has_rank_files(storage, name):
        return None
    converted = not storage.file_exists(f"{name}/{BEGUN}") and not storage.file_exists(f"{name}/{tags.DONE}")
    return saving._fetched(storage, name) if converted else saving.fetch(storage, name)


def _has_model_alone(path: Any) -> bool:
    storage, name = _parts(path)
    if isinstance(storage, FsspecCheckpointStorage):
        there = [bool(storage.files.exists(f"{storage.base}/{name}/{part}")) for part in (writing.MODEL, writing.OPTIMIZER)]
    else:
        there = [(storage.root / name / part).is_dir() for part in (writing.MODEL, writing.OPTIMIZER)]
    return there == [True, False]


def _has_rank_files(storage: BaseCheckpointStorage, name: str) -> bool:
    first = original_files.Rank()
    return any(storage.file_exists(f"{name}/{writing.MODEL}/{first.file_name(experts)}") for experts in (False, True))


class _Explained(StoredWeights):
    """A run's weights; what does not fit the model is explained."""

    def __init__(self, of: StoredWeights, path: str):
        super().__init__(of.folder, of.master)
        self.path = path

    def load_into(self, module: torch.nn.Module, strict: bool) -> None:
        try:
            super().load_into(module, strict)
        except RuntimeError as error:
            raise _other_model(error, self.path) from error


def _other_model(error: RuntimeError, path: str) -> RuntimeError:
    return RuntimeError(
        f"{error}. Training would have gone on from {path}, which is of another model: to train this one, give it another exp_manager.name (or "
        "explicit_log_dir), or another resume_from_checkpoint; nothing was changed"
    )


class _Unread(StoredOptimizer):
    """In the place of an optimizer's state that is not to be loaded."""

    def __init__(self) -> None:
        super().__init__(Path())

    def _read(self) -> dict[str, Any]:
        return {}

    def load_into(self, optimizer: torch.optim.Optimizer, module: Any) -> None:
        pass


def _adapters_alone(names: Iterable[str]) -> bool:
    """Whether there are adapters, and no weight of what they are for."""
    there = list(names)
    modules = {name.partition(".lora_")[0] for name in there if ".lora_" in name}
    return bool(modules) and not any(name.rpartition(".weight")[0] in modules for name in there)


class _OnTop(StoredWeights):
    """Adapters, and the weights that are loaded before them."""

    def __init__(self, adapters: Any, base: Any):
        vars(self).update(vars(adapters))
        self.adapters = adapters
        self.base = base

    def load_into(self, module: torch.nn.Module, strict: bool) -> None:
        self.base.load_into(module, strict)
        self.adapters.changed |= self.changed
        self.adapters.load_into(module, strict)


class OriginalWeights(StoredWeights):
    """`checkpoint["state_dict"]` of a checkpoint that the original wrote: names; values go from the files of ranks into a model."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.changed = False
        self._names = list(original_states.model_state(original_files.find(folder).model).parts)

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        raise NotImplementedError(_NO_VALUES)

    def __setitem__(self, name: str, value: Any) -> None:
        raise NotImplementedError(_NO_VALUES)

    def __delitem__(self, name: str) -> None:
        raise NotImplementedError(_NO_VALUES)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._names))

    def load_into(self, module: torch.nn.Module, strict: bool) -> None:
        """Fill a module. Weights that are only in the optimizer's master weights come with the optimizer."""
        state = original_states.model_state(original_files.find(self.folder).model)
        if state.absent and (self.folder / writing.OPTIMIZER).is_dir():
            return
        try:
            original.load(self.folder, module, None, None, strict, OPTIONAL)
        except RuntimeError as error:
            raise _other_model(error, str(self.folder)) from error


_NO_VALUES = (
    "the values of a checkpoint that NxD wrote are in files of its ranks, and only a model says how they fit together: change them after they are loaded, or "
    "write the checkpoint anew (nxd-ckpt convert) and go on from that"
)


class OriginalOptimizer(StoredOptimizer):
    """An entry of `checkpoint["optimizer_states"]` of a checkpoint that the original wrote."""

    def __init__(self, folder: Path, weights: OriginalWeights):
        super().__init__(folder)
        self.weights = weights

    def _read(self) -> dict[str, Any]:
        return {}

    def load_into(self, optimizer: torch.optim.Optimizer, module: Any) -> None:
        """Fill an optimizer, and the module that it updates. States of data-parallel ranks that the original never wrote begin anew, with a warning."""
        try:
            original.load(self.folder, module, optimizer, None, True, OPTIONAL)
        except UnwrittenShardsError as error:
            logger.warning("%s. Here its moments begin anew; weights, steps and learning rates go on", error)
