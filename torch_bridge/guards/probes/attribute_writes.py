"""Writes and deletions of attributes."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from torch_bridge.guards.conditions import MISSING
from torch_bridge.guards.observer import ACTIVE, Observer
from torch_bridge.guards.probes.attributes import attribute, dict_of, is_data_descriptor
from torch_bridge.guards.probes.calling import call
from torch_bridge.guards.probes.kinds import called
from torch_bridge.guards.probes.updates import update
from torch_bridge.guards.values import is_a


def set_attribute(value: object, x: object, name: str) -> None:
    """`x.name = value`."""
    observer = ACTIVE.observer
    if observer is None or observer.reason:
        return setattr(x, name, value)
    if is_a(x, torch.Tensor) and name == "requires_grad":
        return setattr(x, name, value)  # as `requires_grad_()`: of arguments and of tensors that were read it is compared
    if is_a(x, (torch.Tensor, type, types.ModuleType)):
        observer.effect(f"it sets {getattr(x, '__name__', 'a tensor')}.{name}")
        return setattr(x, name, value)
    how = observer.lookup(type(x), "__setattr__")
    if is_a(how, types.FunctionType) and how is not torch.nn.Module.__setattr__:
        call(how, x, name, value)
        return None
    return store(observer, x, name, lambda: setattr(x, name, value))


def store(observer: Observer, x: object, name: str, do: Callable[[], None]) -> None:
    """Set or delete an attribute, and note what it was."""
    raw = observer.lookup(type(x), name)
    if name in ("__dict__", "__class__"):
        observer.effect(f"it sets {called(x)}.{name}")
        return do()
    if raw is not MISSING and is_data_descriptor(raw):
        if (is_a(raw, property) and raw.fset is not None) or not observer.is_own(x):
            observer.effect(f"it sets {called(x)}.{name}")
        return do()
    held = dict_of(x)
    if held is None:
        if not observer.is_own(x):
            observer.effect(f"it sets {called(x)}.{name}")
        return do()
    if is_a(x, torch.nn.Module) and not observer.is_own(x):
        for kind in ("_parameters", "_buffers", "_modules"):
            part = held.get(kind)
            if is_a(part, dict):
                observer.writes(x, part, name, f"{called(x)}.{name}")
    observer.writes(x, held, name, f"{called(x)}.{name}")
    return do()


def delete_attribute(x: object, name: str) -> None:
    """`del x.name`."""
    observer = ACTIVE.observer
    if observer is None or observer.reason:
        return delattr(x, name)
    how = observer.lookup(type(x), "__delattr__") if not is_a(x, (torch.Tensor, type, types.ModuleType)) else None
    if how is None or (is_a(how, types.FunctionType) and how is not torch.nn.Module.__delattr__):
        observer.effect(f"it deletes {called(x)}.{name}")
        return delattr(x, name)
    return store(observer, x, name, lambda: delattr(x, name))


def attribute_before(x: object, name: str) -> tuple[Any, str, Any]:
    """The left of `x.name += value`, which is read before the right."""
    return x, name, attribute(x, name)


def update_attribute(x: object, name: str, before: object, op: str, value: object) -> None:
    """`x.name += value` and the like."""
    set_attribute(update(before, op, value), x, name)
