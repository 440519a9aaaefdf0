"""What a checkpoint on disk gives Lightning: weights and optimizer states that are read when they are needed, by each device its own part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch

from nxd_jax.checkpoint import reading
from nxd_jax.tensor_parallel import rank_files


class StoredWeights(MutableMapping[str, torch.Tensor]):
    """`checkpoint["state_dict"]` of a checkpoint on disk: full weights by name, on the CPU, read when asked for.

    Hooks (`on_load_checkpoint`) may look at it and change it. Unchanged, every device reads its own part of each weight and no process all of it.
    """

    def __init__(self, folder: Path, master: Path | None):
        self.folder = folder
        self.master = master if master is not None and master.is_dir() else None
        self.changed = False
        self._files = reading.Folder(folder)
        self._names = list(self._files.names())
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._values:
            self._values[name] = self._files.full(name)
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.changed = True
        if name not in self._names:
            self._names.append(name)
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        if name not in self._names:
            raise KeyError(name)
        self.changed = True
        self._names.remove(name)
        self._values.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._names))

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"StoredWeights({len(self)} tensors in {self.folder})"

    def load_into(self, module: torch.nn.Module, strict: bool) -> None:
        """Fill a module. Raises RuntimeError for names or shapes that do not fit."""
        if self.changed:
            load_full(module, dict(self), strict)
        else:
            reading.load_model(self.folder, module, strict, self.master)


def load_full(module: torch.nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Fill a module from full weights: of those that ranks share out, each takes its part."""
    module.load_state_dict(rank_files.get_sharded_model_dict(module, dict(state)), strict=strict)


def load_plain(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Fill an optimizer from a state dict. Raises ValueError if its tensors do not have the shapes of the parameters, which torch would not notice."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, entries in dict(state.get("state", {})).items():
        for name, value in entries.items() if isinstance(index, int) and index < len(parameters) else ():
            shape = parameters[index].shape
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != shape:
                raise ValueError(
                    f"the checkpoint's optimizer has {name} of shape {list(value.shape)} for a parameter of shape {list(shape)}: ranks hold parts of it, and "
                    "only NeuronCheckpointIO's can be shared out. Load the weights by trainer.validate(module, ckpt_path=...), then call fit without it"
                )
    optimizer.load_state_dict(state)


class StoredOptimizer(Mapping[str, Any]):
    """An entry of `checkpoint["optimizer_states"]` of a checkpoint on disk. As a mapping it shows options and what is no array."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._objects: dict[str, Any] | None = None

    def _read(self) -> dict[str, Any]:
        if self._objects is None:
            self._objects = reading.Folder(self.folder).objects()
        return self._objects

    def __getitem__(self, name: str) -> Any:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def load_into(self, optimizer: torch.optim.Optimizer, module: Any) -> None:
        """Fill an optimizer whose parameters are this module's. Raises ValueError for the state of other parameters."""
        reading.load_optimizer(self.folder, optimizer, module)


class LiveOptimizer(Mapping[str, Any]):
    """An entry of `checkpoint["optimizer_states"]` while a checkpoint is made: the optimizer itself; as a mapping, its state dict."""

    def __init__(self, optimizer: Any, module: Any):
        self.optimizer = optimizer
        self.module = module

    def __getitem__(self, name: str) -> Any:
        return self.optimizer.state_dict()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.optimizer.state_dict())

    def __len__(self) -> int:
        return len(self.optimizer.state_dict())
