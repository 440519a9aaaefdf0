"""`torch.FloatTensor([loss.item()])`, `torch.Tensor([loss.item()])`: torch's old constructors, of numbers that differ by rank.

They are types of C code that reads a number's memory and asks nobody, so all ranks would get the first one's. Once there are such numbers, types that know
them stand in their place, and `torch.Tensor`, whose subclasses are many, has a `__new__` that does; all else they leave to torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_bridge.per_rank import rank_functions
from torch_bridge.recorder import rank_array

_NAMES = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")


class _Kind(type):
    """Of a type that stands for one of torch's."""

    of_torch: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and rank_functions.hold_ranks(args):
            return torch.tensor(args[0], dtype=cls.of_torch.dtype)
        return cls.of_torch(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.of_torch)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return subclass is cls or issubclass(subclass, cls.of_torch)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.of_torch, name)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.of_torch

    def __hash__(cls) -> int:
        return hash(cls.of_torch)

    def __repr__(cls) -> str:
        return repr(cls.of_torch)


@functools.cache
def install() -> None:
    """Once there is a number that differs by rank."""
    for name in _NAMES:
        kind = getattr(torch, f"{name}Tensor")
        text = f"torch.{name}Tensor"  # what `t.type(kind)` looks at
        setattr(torch, f"{name}Tensor", _Kind(text, (), {"of_torch": kind, "__module__": "torch", "__qualname__": f"{name}Tensor"}))
    torch.Tensor.__new__ = _new  # type: ignore[method-assign]
    torch.set_default_tensor_type = _default_type(torch.set_default_tensor_type)


def _new(*args: Any, **kwargs: Any) -> Any:
    """`torch.Tensor.__new__`; TorchDynamo insists on this signature."""
    if len(args) == 2 and args[0] is torch.Tensor and type(args[1]) in _DATA and rank_functions.hold_ranks(args[1:]) and not kwargs:
        return torch.tensor(args[1], dtype=torch.get_default_dtype())
    return torch._C.TensorBase.__new__(*args, **kwargs)


_DATA = {list, tuple, rank_array.RankArray}


def _default_type(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def set_default_tensor_type(t: Any) -> None:
        kind = torch._utils._import_dotted_name(t) if isinstance(t, str) else t
        original(kind.of_torch if type(kind) is _Kind else kind)

    return set_default_tensor_type
