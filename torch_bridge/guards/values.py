"""Which Python values cannot change, and when two of them are the same."""

from __future__ import annotations

import enum
import types
from typing import Any

import torch

from torch_bridge.runtime.transfer import bits

BYTES = 1 << 16
"""Bytes of the largest array or CPU tensor whose contents are compared before each call."""
PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range, slice)
TORCH_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo)
_ATOMS = frozenset({*PLAIN, *TORCH_PLAIN})
_CALLABLE = (types.BuiltinFunctionType, types.CodeType, types.MethodWrapperType, types.WrapperDescriptorType, types.MethodDescriptorType)


def is_a(x: Any, kinds: Any) -> bool:
    """`isinstance` by the object's type alone: asking the object for its `__class__` may run code of the script's."""
    return issubclass(type(x), kinds)


def unchanging(x: Any) -> bool:
    """Whether a value can never be another one: a number, a string, a dtype, a member of an enum, or a tuple of such."""
    kind = type(x)
    if kind in _ATOMS or is_a(x, enum.Enum):
        return True
    if kind is tuple or kind is frozenset:
        return all(map(unchanging, x))
    return is_a(x, (type, *_CALLABLE)) and not is_a(getattr(x, "__self__", None), (list, dict, set))


def alike(a: Any, b: Any) -> bool:
    """Whether code that reads `b` does what it would do with `a`: the same object, or plain values of one type that are equal (-0.0 is not 0.0)."""
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is float or kind is complex:
        return repr(a) == repr(b)
    if kind is range or kind is slice:  # ranges are equal if their elements are
        return all(map(alike, (a.start, a.stop, a.step), (b.start, b.stop, b.step)))
    if kind in _ATOMS:
        return bool(a == b)
    if kind is tuple:
        return len(a) == len(b) and all(map(alike, a, b))
    if kind is frozenset:
        return bool(a == b) and unchanging(a) and _tokens(a) == _tokens(b)
    if kind is torch.Tensor and a.device.type == b.device.type == "cpu":
        return same_contents(a, b)
    return False


def _tokens(x: frozenset[Any]) -> set[tuple[type, str]]:
    """Its elements with their types: 1, 1.0 and True are equal."""
    return {(type(y), repr(y)) for y in x}


def same_contents(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two small CPU tensors without gradients hold the same bits in the same layout."""
    alike_outside = (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()) and not (a.requires_grad or b.requires_grad)
    return alike_outside and a.layout is b.layout is torch.strided and max(a.nbytes, b.nbytes) <= BYTES and bits(a) == bits(b)


def shown(x: object) -> str:
    """A value in a message."""
    return repr(x)[:60] if unchanging(x) else f"a {type(x).__name__}"
