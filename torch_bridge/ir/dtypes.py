"""torch dtypes <-> JAX (numpy) dtypes, and torch's rules for promoting them.

All functions here run under 64-bit JAX (`_compat.enable_x64`): torch's int64 and float64 stay what they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.typing import ArrayLike, DTypeLike

from torch_bridge import _compat

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_PAIRS = {
    torch.bool: jnp.bool_,
    torch.uint8: jnp.uint8,
    torch.uint16: jnp.uint16,
    torch.uint32: jnp.uint32,
    torch.uint64: jnp.uint64,
    torch.int8: jnp.int8,
    torch.int16: jnp.int16,
    torch.int32: jnp.int32,
    torch.int64: jnp.int64,
    torch.float16: jnp.float16,
    torch.bfloat16: jnp.bfloat16,
    torch.float32: jnp.float32,
    torch.float64: jnp.float64,
    torch.complex64: jnp.complex64,
    torch.complex128: jnp.complex128,
    torch.float8_e4m3fn: jnp.float8_e4m3fn,
    torch.float8_e5m2: jnp.float8_e5m2,
}
_TO_JAX = {t: jnp.dtype(j) for t, j in _PAIRS.items()}
_TO_TORCH = {j: t for t, j in _TO_JAX.items()}


def to_jax(dtype: torch.dtype) -> np.dtype:
    """The numpy dtype that JAX uses for a torch dtype; `TypeError` for one that JAX has no form of."""
    try:
        return _TO_JAX[dtype]
    except KeyError:
        raise TypeError(
            f"{dtype} has no JAX form, so it cannot live on device 'xla'; supported: "
            + ", ".join(str(t) for t in _TO_JAX)
            + ". Convert the tensor first, for example with .to(torch.float32)."
        ) from None


def to_torch(dtype: DTypeLike) -> torch.dtype:
    """The torch dtype of a JAX or numpy dtype."""
    return _TO_TORCH[jnp.dtype(dtype)]


class Scalar:
    """A Python number that reaches the compiled program as an input instead of a constant.

    `kind` is the Python type it had (`float` or `int`), which decides type promotion as torch does for numbers;
    `value` is a 0-d JAX array (float64 or int64).
    """

    __slots__ = ("kind", "value")

    def __init__(self, kind: type, value: jax.Array):
        self.kind = kind
        self.value = value

    def __repr__(self) -> str:
        return f"Scalar({self.kind.__name__})"


def plain(x: int | float | Scalar) -> Any:
    """What a lowering computes with: a Python number as it is, a `Scalar`'s array."""
    return x.value if isinstance(x, Scalar) else x


SchemaScalar: TypeAlias = int | float | complex | Scalar


def is_number(x: object) -> TypeIs[SchemaScalar]:
    """True for what torch's schema calls a Scalar: a Python number or a lifted `Scalar`."""
    return isinstance(x, (bool, int, float, complex, Scalar))


def cast(x: ArrayLike | Scalar, dtype: DTypeLike) -> jax.Array:
    """`x` (JAX array, Python number or `Scalar`) as a JAX array of a numpy dtype, converted as C does.

    Floats are truncated towards zero, integers wrap, and complex to real drops the imaginary part. What float8_e4m3fn cannot hold becomes what torch makes
    of it.
    """
    if isinstance(x, Scalar):
        x = x.value
    dtype = jnp.dtype(dtype)
    if isinstance(x, int) and not isinstance(x, bool) and np.issubdtype(dtype, np.integer):
        return jnp.asarray(np.asarray(x & (2 ** (8 * dtype.itemsize) - 1), dtype=np.uint64).astype(dtype))  # wraps, as C does
    x = jnp.asarray(x)
    if x.dtype == dtype:
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        x = x.real if dtype != jnp.bool_ else x != 0
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.integer):
        # C truncates and then wraps narrow and unsigned results, where XLA saturates.
        if dtype.itemsize < 4:
            x = x.astype(jnp.int32)
        elif dtype == jnp.uint32:
            x = x.astype(jnp.int64)
    if dtype == jnp.float8_e4m3fn and _compat.float8_saturates():
        x = jnp.clip(x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32), -448, 448)
    if x.dtype == jnp.bool_ and jnp.issubdtype(dtype, jnp.inexact):
        # XLA makes a select of a product with a converted bool, which gives 0 where torch's inf * 0 is NaN.
        return jnp.where(x, jnp.ones((), dtype), jnp.zeros((), dtype))
    return x.astype(dtype)


def _category(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 0
    if dtype.is_complex:
        return 3
    return 2 if dtype.is_floating_point else 1


def _number_dtype(x: SchemaScalar) -> torch.dtype:
    kind = x.kind if isinstance(x, Scalar) else type(x)
    if kind is bool:
        return torch.bool
    if kind is int:
        return torch.int64
    default = torch.get_default_dtype()
    if kind is complex:
        return torch.complex128 if default == torch.float64 else torch.complex64
    return default


def result_dtype(*operands: jax.Array | SchemaScalar | None) -> torch.dtype:
    """torch's `result_type` over JAX arrays and Python numbers.

    Tensors with dims win over 0-d tensors, which win over numbers; a lower class only matters when its category
    (bool < int < float < complex) is higher.
    """
    classes: list[torch.dtype | None] = [None, None, None]
    for x in operands:
        if x is None:
            continue
        if is_number(x):
            level, dtype = 2, _number_dtype(x)
        else:
            level, dtype = (0 if x.ndim else 1), to_torch(x.dtype)
        seen = classes[level]
        classes[level] = dtype if seen is None else torch.promote_types(seen, dtype)
    result: torch.dtype | None = None
    for of_class in classes:
        if of_class is None:
            continue
        if result is None:
            result = of_class
        elif _category(of_class) > _category(result):
            if not of_class.is_complex:
                result = torch.promote_types(result, of_class)
            else:  # a float tensor keeps its width when a lesser class makes it complex
                result = result.to_complex() if result.is_floating_point else of_class
    assert result is not None, "result_dtype needs an operand"
    return result


def promote(*operands: jax.Array | SchemaScalar | None) -> list[Any]:
    """The operands as JAX arrays of their common torch dtype (None stays None)."""
    dtype = to_jax(result_dtype(*operands))
    return [None if x is None else cast(x, dtype) for x in operands]


def floating(*operands: jax.Array | SchemaScalar | None) -> list[Any]:
    """Like `promote`, and integer or bool results become torch's default float dtype (`sqrt`, true division, ...)."""
    dtype = result_dtype(*operands)
    if _category(dtype) < 2:
        dtype = torch.get_default_dtype()
    return [None if x is None else cast(x, to_jax(dtype)) for x in operands]
