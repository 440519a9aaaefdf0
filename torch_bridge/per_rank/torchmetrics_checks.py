"""torchmetrics' checks of what a metric is given, in a process that runs the script once for several ranks.

`Accuracy(task="multiclass")` and its kin look at the distinct values of labels (`torch.unique`), of which each rank has another number: no tensor could hold
them. The checks give nothing back, so each runs once for each rank, on its part on the CPU.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch

from torch_bridge.config.late_imports import when_imported
from torch_bridge.mesh import world
from torch_bridge.recorder import rank_array
from torch_bridge.recorder.rank_tensor import RankTensor

_LIBRARY = "torchmetrics"
_MODULES = ("calibration_error", "confusion_matrix", "hinge", "precision_recall_curve", "ranking", "stat_scores")
_ENDING = "_tensor_validation"


@functools.cache
def install() -> None:
    """Once there is a number that differs by rank."""
    for name in _MODULES:
        when_imported(f"{_LIBRARY}.functional.classification.{name}", _replace)


def _replace(module: ModuleType) -> None:
    """Put checks for each rank in the place of a module's, and wherever they have been imported by name."""
    found = {
        f: _for_each_rank(f)
        for name, f in vars(module).items()
        if name.endswith(_ENDING) and inspect.isfunction(f) and f.__module__ == module.__name__
    }
    for name, other in list(sys.modules.items()):
        if name.partition(".")[0] == _LIBRARY:
            vars(other).update({key: found[f] for key, f in list(vars(other).items()) if isinstance(f, FunctionType) and f in found})


def _for_each_rank(check: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(check)
    def checked(*args: Any, **kwargs: Any) -> None:
        from torch_bridge.recorder import sharded  # they need JAX, which importing this package does not
        from torch_bridge.recorder.tensor import XLATensor

        count = len(world.current().hosted)
        if count == 1 or not any(isinstance(x, (XLATensor, RankTensor)) for x in (*args, *kwargs.values())):
            check(*args, **kwargs)
            return
        parts = {id(x): sharded.shards(x.detach()) for x in (*args, *kwargs.values()) if isinstance(x, XLATensor)}
        for place in range(count):
            own = functools.partial(_own, parts, place)
            check(*map(own, args), **{name: own(x) for name, x in kwargs.items()})

    return checked


def _own(parts: dict[int, list[torch.Tensor]], place: int, x: Any) -> Any:
    """What the hosted rank at this place gives."""
    found = parts.get(id(x))
    return rank_array.own(x, place) if found is None else found[place]
