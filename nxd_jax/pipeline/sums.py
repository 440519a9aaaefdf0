"""What gradients of weights are added up in, and whether anybody is told when they are."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torch import nn

from torch_bridge.ir.segment import Storage
from torch_bridge.recorder import autograd_engine
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.replay import accumulate_grad

_GRAD, _HOOKS, _HOOKS_AFTER = map(attrgetter, ("grad", "_backward_hooks", "_post_accumulate_grad_hooks"))


def sums_of(parameters: Sequence[nn.Parameter]) -> list[Any]:
    """What gradients are added up in: `.grad`, and the optimizer's `.main_grad` (`autograd_engine.adds_up`); None where there is none."""
    return [*map(_GRAD, parameters), *(p.__dict__.get("main_grad") for p in parameters)]


def storages_of(sums: Sequence[Any]) -> list[Storage | None]:
    """The storages of those that are xla tensors, None for others."""
    return [t._storage if isinstance(t, XLATensor) else None for t in sums]


def unhooked(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether gradients may be added up without telling anybody."""
    if any(map(_HOOKS, parameters)) or not accumulate_grad.unwatched():
        return False
    return not any(map(_HOOKS_AFTER, parameters)) or all(map(autograd_engine.only_adds_up, parameters))
