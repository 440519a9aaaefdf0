"""Arguments of functions in C, which look at them without asking a probe."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from torch_bridge.guards.observer import Observer
from torch_bridge.guards.probes.kinds import BUILTIN, ITERATORS, VIEWS, in_python
from torch_bridge.guards.values import is_a, unchanging


def check_arguments(observer: Observer, args: Iterable[Any], kwargs: dict[str, Any], doing: str) -> None:
    """Arguments of something in C: plain values, tensors, and containers of such; what is in them is noted."""
    for x in (*args, *kwargs.values()):
        _check_argument(observer, x, doing)


def _check_argument(observer: Observer, x: Any, doing: str) -> None:
    if is_a(x, torch.Tensor) or unchanging(x):
        return
    kind = type(x)
    if kind in (*BUILTIN, tuple):
        observer.elements(x)
        for y in [*x.keys(), *x.values()] if is_a(x, dict) else x:
            _check_argument(observer, y, doing)
    elif is_a(x, np.ndarray):
        observer.array(x)
    elif is_a(x, (*_PASSED, np.generic)) or (is_a(x, (*ITERATORS, *VIEWS)) and observer.is_own(x)):
        pass
    elif is_a(x, tuple) and not in_python(observer, x, ("__iter__", "__len__")):
        for y in x:
            _check_argument(observer, y, doing)
    else:
        observer.refuse(f"it {doing} a {kind.__name__}")


_PASSED = (torch.SymInt, torch.SymFloat, torch.SymBool, slice, torch.Generator, types.FunctionType, types.ModuleType)
