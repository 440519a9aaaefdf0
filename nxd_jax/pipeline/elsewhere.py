"""Parameters and buffers of stages that this process has no part of: they are taken out of the model, and stand in it again while it is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from nxd_jax.pipeline.stages import Stages


class _Entry(NamedTuple):
    """A parameter or buffer that was taken out. table: the module's, which held it under `name`."""

    table: dict[str, Any]
    name: str
    value: torch.Tensor


class Elsewhere:
    """What was taken out of a model, as tensors without values (on "meta").

    Attributes:
        names: under which the model had it, as in a state dict.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._entries: list[_Entry] = []
        self._meta: dict[int, torch.Tensor] = {}
        self._replaced: set[int] = set()

    def take_out(self, model: nn.Module, stages: Stages, goes: Callable[[int], bool]) -> None:
        """Take parameters and buffers out of a model and of the stages made of it. goes: whether one does, by its `id`."""
        for prefix, module in model.named_modules(remove_duplicate=False):
            for table in (module._parameters, module._buffers):
                self.names |= {f"{prefix}.{name}".lstrip(".") for name, t in table.items() if t is not None and goes(id(t))}
        roots = (model, *(stage.module for stage in stages))
        for module in dict.fromkeys(m for root in roots for m in root.modules()):
            for table in (module._parameters, module._buffers):
                found: dict[str, Any] = table
                for name, t in found.items():
                    if t is not None and goes(id(t)):
                        self._entries.append(_Entry(found, name, self._without_values(t)))
                        found[name] = None

    def _without_values(self, t: torch.Tensor) -> torch.Tensor:
        """The same shape and attributes on "meta"; one for all names of a tensor."""
        if id(t) not in self._meta:
            empty: torch.Tensor = torch.empty(t.shape, dtype=t.dtype, device="meta")
            if isinstance(t, nn.Parameter):
                empty = nn.Parameter(empty, t.requires_grad)
                empty.__dict__.update({key: value for key, value in t.__dict__.items() if not key.startswith("_")})
            self._meta[id(t)] = self._meta[id(empty)] = empty
        return self._meta[id(t)]

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """A block in which the model has all of it, without values."""
        for table, name, value in self._entries:
            if table[name] is not None and table[name] is not value:
                self._replaced.add(id(value))
            table[name] = value
        try:
            yield
        finally:
            for table, name, _ in self._entries:
                table[name] = None

    def was_replaced(self, weight: torch.Tensor) -> bool:
        """Whether somebody gave a module another parameter in the place of this one, which was taken out."""
        return id(self._meta.get(id(weight))) in self._replaced

    def of_here(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of a state dict that are not elsewhere."""
        return {name: value for name, value in state.items() if name not in self.names}


def needed(stages: Stages, here: Iterable[bool]) -> set[int]:
    """The `id`s of parameters and buffers that the stages of this process read."""
    found: set[int] = set()
    for stage, hosted in zip(stages, here, strict=True):
        if hosted:
            found.update(id(t) for t in (*stage.module.parameters(), *stage.module.buffers()))
    return found


def owned(stages: Stages, here: Iterable[bool]) -> set[int]:
    """The `id`s of parameters and buffers that lie with stages of this process: the first stage that reads one has it."""
    mine: set[int] = set()
    others: set[int] = set()
    for stage, hosted in zip(stages, here, strict=True):
        ids = {id(t) for t in stage.module.parameters()}
        (mine if hosted else others).update(ids - mine - others)
        mine.update(id(t) for t in stage.module.buffers() if hosted)
    return mine


def unread_by(stages: Stages, model: nn.Module) -> set[int]:
    """The `id`s of a model's parameters and buffers that no stage reads."""
    return {id(t) for t in (*model.parameters(), *model.buffers())} - needed(stages, [True] * len(stages))
