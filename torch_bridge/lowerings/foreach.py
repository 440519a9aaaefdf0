"""`_foreach_*`: the lowering of one tensor, applied to each of a list.

Lists of tensors or numbers go along element by element; anything else is the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_bridge import _compat
from torch_bridge.lowerings import arithmetic, comparison, conversion, extrema, norms, pointwise, unary  # noqa: F401  (fill the registry)
from torch_bridge.lowerings.registry import Stacks, lookup, lowering
from torch_bridge.lowerings.types import Array

aten = torch.ops.aten
_STACKS = {aten._foreach_mul.Tensor: Stacks(lists=(0,))}
"""Ops that gradients go through before a step, such as when their norm is clipped."""


def _each(op: torch._ops.OpOverload, single: torch._ops.OpOverload) -> None:
    low = lookup(single)
    assert low is not None, f"{single} has no lowering, which {op} is made of"
    fn, names = low.fn, [a.name for a in op._schema.arguments]

    @lowering(op, lift=low.lift, entrywise=True, stacks=_STACKS.get(op))
    def foreach(*args: Any, **kwargs: Any) -> list[Array]:
        given = dict(zip(names, args, strict=False)) | kwargs
        count = next(len(v) for v in given.values() if isinstance(v, (list, tuple)))
        options = {k: v for k, v in given.items() if k in _OPTIONS}
        operands = [v for k, v in given.items() if k not in _OPTIONS]
        return [fn(*(v[i] if isinstance(v, (list, tuple)) else v for v in operands), **options) for i in range(count)]


_OPTIONS = ("alpha", "dtype")

# fmt: off
_UNARY = [
    "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "frac", "lgamma", "log", "log10",
    "log1p", "log2", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "tan", "tanh", "trunc", "clone",
    "zero", "max", "copy",
]
# fmt: on
for _name in filter(_compat.has_foreach, _UNARY):
    _each(getattr(aten, f"_foreach_{_name}").default, getattr(aten, _name).default)

for _name in ("add", "sub", "mul", "div"):
    for _overload in getattr(aten, f"_foreach_{_name}").overloads():
        if _overload in ("List", "Tensor", "Scalar", "ScalarList"):
            _single = "Tensor" if _overload in ("List", "Tensor") else "Scalar"
            _each(getattr(getattr(aten, f"_foreach_{_name}"), _overload), getattr(getattr(aten, _name), _single))

for _name in ("clamp_min", "clamp_max"):
    _op, _single = getattr(aten, f"_foreach_{_name}"), getattr(aten, _name)
    _each(_op.List, _single.Tensor)
    _each(_op.Scalar, _single.default)
    _each(_op.ScalarList, _single.default)

for _name, _single in (("maximum", "clamp_min"), ("minimum", "clamp_max")):
    _op = getattr(aten, f"_foreach_{_name}")
    _each(_op.List, getattr(aten, _name).default)
    _each(_op.Scalar, getattr(aten, _single).default)
    _each(_op.ScalarList, getattr(aten, _single).default)

_each(aten._foreach_pow.List, aten.pow.Tensor_Tensor)
_each(aten._foreach_pow.Scalar, aten.pow.Tensor_Scalar)
_each(aten._foreach_pow.ScalarList, aten.pow.Tensor_Scalar)
_each(aten._foreach_pow.ScalarAndTensor, aten.pow.Scalar)
_each(aten._foreach_lerp.List, aten.lerp.Tensor)
_each(aten._foreach_lerp.Scalar, aten.lerp.Scalar)
_each(aten._foreach_lerp.ScalarList, aten.lerp.Scalar)
for _name in ("addcmul", "addcdiv"):
    _op, _whole = getattr(aten, f"_foreach_{_name}"), getattr(aten, _name).default
    _each(_op.Scalar, _whole)
    _each(_op.ScalarList, _whole)


@lowering(aten._foreach_addcmul.Tensor, entrywise=True)
def foreach_addcmul(self: Sequence[Array], tensor1: Sequence[Array], tensor2: Sequence[Array], scalars: Array) -> list[Array]:
    return [arithmetic.addcmul(*xs, scalars[i]) for i, xs in enumerate(zip(self, tensor1, tensor2, strict=True))]


@lowering(aten._foreach_addcdiv.Tensor, entrywise=True)
def foreach_addcdiv(self: Sequence[Array], tensor1: Sequence[Array], tensor2: Sequence[Array], scalars: Array) -> list[Array]:
    return [arithmetic.addcdiv(*xs, scalars[i]) for i, xs in enumerate(zip(self, tensor1, tensor2, strict=True))]


@lowering(aten._foreach_norm.Scalar, lift=False, entrywise=True)
def foreach_norm(self: Sequence[Array], ord: float = 2, dtype: torch.dtype | None = None) -> list[Array]:
    return [norms.vector_norm(x, ord, dtype=dtype) for x in self]


@lowering(aten._foreach_powsum.Scalar, lift=False, entrywise=True)
def foreach_powsum(self: Sequence[Array], ord: float = 2, dtype: torch.dtype | None = None) -> list[Array]:
    return [norms.powsum(x, ord, dtype=dtype) for x in self]


if _compat.has_foreach("mm"):

    @lowering(aten._foreach_mm.default, entrywise=True)
    def foreach_mm(self: Sequence[Array], mat2: Sequence[Array]) -> list[Array]:
        low = lookup(aten.mm.default)
        if low is None:
            raise NotImplementedError("_foreach_mm: aten.mm has no lowering; multiply the matrices one by one")
        return [low.fn(a, b) for a, b in zip(self, mat2, strict=True)]
