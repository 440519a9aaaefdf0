"""Comparisons, logic and bits, and the predicates on floating point values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.ir import dtypes
from torch_bridge.lowerings.precision import common_dtype, is_complex, is_float, operand
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array, Operand

aten = torch.ops.aten


def _register_comparison(op: torch._ops.OpOverloadPacket, fn: Callable[[Any, Any], Any]) -> None:
    @lowering(op.Tensor, op.Scalar)
    def comparison(self: Operand, other: Operand) -> Array:
        dtype = common_dtype(self, other)
        return fn(operand(self, dtype), operand(other, dtype))


for _op, _fn in (
    (aten.eq, jnp.equal),
    (aten.ne, jnp.not_equal),
    (aten.lt, jnp.less),
    (aten.le, jnp.less_equal),
    (aten.gt, jnp.greater),
    (aten.ge, jnp.greater_equal),
):
    _register_comparison(_op, _fn)


def truth(x: Array) -> Array:
    """x as bools: everything but zero is true, NaN too."""
    return x if x.dtype == jnp.bool_ else x != 0


@lowering(aten.logical_not.default)
def logical_not(self: Array) -> Array:
    return ~truth(self)


def _register_logical(op: torch._ops.OpOverload, fn: Callable[[Any, Any], Any]) -> None:
    @lowering(op)
    def logical(self: Array, other: Array) -> Array:
        return fn(truth(self), truth(other))


_register_logical(aten.logical_and.default, jnp.bitwise_and)
_register_logical(aten.logical_or.default, jnp.bitwise_or)
_register_logical(aten.logical_xor.default, jnp.bitwise_xor)


def _register_bitwise(ops: tuple[torch._ops.OpOverload, ...], fn: Callable[[Any, Any], Any]) -> None:
    @lowering(*ops)
    def bitwise(self: Operand, other: Operand) -> Array:
        return fn(*jnp.broadcast_arrays(*dtypes.promote(self, other)))


def _shift_right(x: Array, count: Array) -> Array:
    unsigned = jnp.issubdtype(x.dtype, jnp.unsignedinteger)
    return lax.shift_right_logical(x, count) if unsigned else lax.shift_right_arithmetic(x, count)


# XLA defines shifts by a negative count or by the width and more as torch does: 0, or the sign bit spread.
for _ops, _bits in (
    ((aten.bitwise_and.Tensor, aten.bitwise_and.Scalar, aten.bitwise_and.Scalar_Tensor), lax.bitwise_and),
    ((aten.bitwise_or.Tensor, aten.bitwise_or.Scalar, aten.bitwise_or.Scalar_Tensor), lax.bitwise_or),
    ((aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar, aten.bitwise_xor.Scalar_Tensor), lax.bitwise_xor),
    ((aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_left_shift.Scalar_Tensor), lax.shift_left),
    ((aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar, aten.bitwise_right_shift.Scalar_Tensor), _shift_right),
    ((aten.__lshift__.Tensor, aten.__lshift__.Scalar), lax.shift_left),
    ((aten.__rshift__.Tensor, aten.__rshift__.Scalar), _shift_right),
):
    _register_bitwise(_ops, _bits)


@lowering(aten.bitwise_not.default)
def bitwise_not(self: Array) -> Array:
    return ~self


def _register_predicate(op: torch._ops.OpOverload, fn: Callable[[Any], Any]) -> None:
    @lowering(op)
    def predicate(self: Array) -> Array:
        return fn(self) if is_float(self) else jnp.zeros(self.shape, jnp.bool_)


_register_predicate(aten.isnan.default, lambda x: x != x)
_register_predicate(aten.isinf.default, jnp.isinf)
_register_predicate(aten.isposinf.default, lambda x: x == jnp.inf)
_register_predicate(aten.isneginf.default, lambda x: x == -jnp.inf)


@lowering(aten.signbit.default)
def signbit(self: Array) -> Array:
    return jnp.signbit(self) if is_float(self) else truth(self) & (self < 0)


@lowering(aten.sign.default)
def sign(self: Array) -> Array:
    """-1, 0 or 1; torch gives 0 for NaN."""
    if self.dtype == jnp.bool_:
        return self
    return (self > 0).astype(self.dtype) - (self < 0).astype(self.dtype)


@lowering(aten.sgn.default)
def sgn(self: Array) -> Array:
    """`sign`, and x / |x| for complex x (0 at 0)."""
    return jnp.sign(self) if is_complex(self) else sign(self)
