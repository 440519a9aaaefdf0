"""`x += value` and the like."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torch_bridge.guards.conditions import MISSING
from torch_bridge.guards.observer import ACTIVE
from torch_bridge.guards.probes.calling import call
from torch_bridge.guards.probes.kinds import BUILTIN
from torch_bridge.guards.probes.operators import operand
from torch_bridge.guards.values import is_a


def update(x: Any, op: str, value: object) -> Any:
    """The new value of a name in `x += value` and the like."""
    observer = ACTIVE.observer
    if observer is not None and not observer.reason:
        how = MISSING if is_a(x, torch.Tensor) else observer.lookup(type(x), f"__{op}__")
        if is_a(how, types.FunctionType):
            found = call(how, x, value)
            if found is not NotImplemented:
                return found
            observer.refuse(f"it applies an operator to a {type(x).__name__}")
            return _OPERATOR[op](x, value)
        operand(value)
        if is_a(x, torch.Tensor):
            if not observer.may_write_host(x):
                observer.refuse("it writes into a CPU tensor that was there before")
        elif is_a(x, np.ndarray) or type(x) in BUILTIN:
            if not observer.is_own(x):
                observer.effect(f"it changes a {type(x).__name__}")
        else:
            operand(x)
    return getattr(operator, op)(x, value)


_OPERATOR: dict[str, Callable[[Any, Any], Any]] = {
    "iadd": operator.add,
    "isub": operator.sub,
    "imul": operator.mul,
    "itruediv": operator.truediv,
    "ifloordiv": operator.floordiv,
    "imod": operator.mod,
    "ipow": operator.pow,
    "imatmul": operator.matmul,
    "ilshift": operator.lshift,
    "irshift": operator.rshift,
    "ior": operator.or_,
    "ixor": operator.xor,
    "iand": operator.and_,
}
