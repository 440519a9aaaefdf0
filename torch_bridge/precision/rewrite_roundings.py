"""Changes the roundings of a traced JAX function: to stochastic ones, and those of matrix operands to a narrower type.

The function is traced to a jaxpr and evaluated again, primitive by primitive, through calls, loops and branches:

- a conversion to bfloat16 or float16 is rounded stochastically (from float64 and integers by way of float32);
- arithmetic on bfloat16 or float16 itself is done in float32 and its result rounded stochastically;
- float32 operands of matrix products and convolutions are rounded to the matmul type, and the products summed in float32.

Primitives that only move values or choose among them are exact in any dtype and stay as they are; so do `reduce_precision`, which the lowerings use
for constants of an op. Kernels written by hand (`pallas_call`) are not looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from torch_bridge.ir import jaxprs
from torch_bridge.precision import stochastic_rounding

BITS = {"bf16": (8, 7), "fp16": (5, 10), "tf32": (8, 10), "fp8_e4m3": (4, 3)}
"""Exponent and mantissa bits of what `--auto-cast-type` may be."""

HALF = {"bf16": jnp.dtype(jnp.bfloat16), "fp16": jnp.dtype(jnp.float16)}
"""Those among them that are dtypes in which XLA multiplies."""

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot"})

_ARITHMETIC = _PRODUCTS.union(
    {"add", "add_any", "sub", "mul", "div", "rem", "pow", "integer_pow", "square", "exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "cbrt", "logistic"},
    {"sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"},
    {"erf", "erfc", "erf_inv", "lgamma", "digamma", "igamma", "igammac", "polygamma", "zeta", "bessel_i0e", "bessel_i1e"},
    {"reduce_sum", "reduce_prod", "cumsum", "cumprod", "cumlogsumexp", "reduce_window_sum", "select_and_scatter_add"},
    {"scatter-add", "scatter_add", "scatter-mul", "psum", "psum_invariant", "psum2", "reduce_scatter"},
)  # fmt: skip
"""Primitives whose result has to be rounded when it is in half precision."""


def rewrite(
    run: Callable[..., Any], inputs: Sequence[Any], words: Any = None, places: Sequence[Any] = (), matmul: str | None = None
) -> Any:
    """`run(*inputs)` with other roundings.

    words: random uint32 of shape (2,) for stochastic rounding, None: to nearest.
    places: `stochastic_rounding.place_numbers`.
    matmul: a key of `BITS`.
    """
    pair = None if words is None else (words[0], words[1])
    evaluation = _Evaluation(matmul, places)
    return jaxprs.traced(run, inputs, lambda jaxpr, flat: evaluation.run(jaxpr, flat, pair))


class _Evaluation:
    """One walk through a jaxpr. It counts the roundings, which each get random numbers of their own."""

    def __init__(self, matmul: str | None, places: Sequence[Any]):
        self.matmul = matmul
        self.places = places
        self.count = 0

    def run(self, jaxpr: Any, inputs: Sequence[Any], words: Any) -> list[Any]:
        """The values of the jaxpr's results."""
        return jaxprs.evaluate(jaxpr, inputs, lambda eqn, values: self.equation(eqn, values, words))

    def equation(self, eqn: Any, values: list[Any], words: Any) -> list[Any]:
        """The results of one equation, as a list."""
        name = eqn.primitive.name
        inner = jaxprs.called(eqn)
        if inner is not None:
            return self.run(inner, values, words)
        results = jaxprs.structured(eqn, values, lambda jaxpr, given, i: self.run(jaxpr, given, words if i is None else _turn(words, i)))
        if results is not None:
            return results
        if words is not None and name == "convert_element_type" and _rounds(eqn):
            return [self.rounded(values[0].astype(jnp.float32), eqn.outvars[0].aval.dtype, words)]
        if self.matmul is not None and name in _PRODUCTS and all(v.aval.dtype == jnp.float32 for v in eqn.invars[:2]):
            given = [*(self.operand(v, words) for v in values[:2]), *values[2:]]
            return jaxprs.bind(eqn, given, preferred_element_type=jnp.dtype(jnp.float32))
        if words is not None and name in _ARITHMETIC and eqn.outvars[0].aval.dtype in stochastic_rounding.HALF:
            return self.in_float32(eqn, values, words)
        return jaxprs.bind(eqn, values)

    def rounded(self, x: Any, dtype: Any, words: Any) -> Any:
        """A float32 array in a half dtype, rounded stochastically."""
        place = stochastic_rounding.place_of(self.count, self.places)
        self.count += 1
        return stochastic_rounding.drawn(x, words, place, dtype=jnp.dtype(dtype))

    def operand(self, x: Any, words: Any) -> Any:
        """A float32 operand of a product in the matmul type, or with its precision."""
        assert self.matmul is not None
        half = HALF.get(self.matmul)
        if half is None:
            return stochastic_rounding.nearest(x, *BITS[self.matmul])
        return x.astype(half) if words is None else self.rounded(x, half, words)

    def in_float32(self, eqn: Any, values: list[Any], words: Any) -> list[Any]:
        """Arithmetic on half precision in float32, rounded once."""
        wide = [v.astype(jnp.float32) if getattr(v, "dtype", None) in stochastic_rounding.HALF else v for v in values]
        if eqn.primitive.name in _SCATTERS:
            results = [_scatter(eqn, wide)]
        elif "preferred_element_type" in eqn.params:
            results = jaxprs.bind(eqn, wide, preferred_element_type=jnp.dtype(jnp.float32))
        else:
            results = jaxprs.bind(eqn, wide)
        return [
            self.rounded(r, v.aval.dtype, words) if v.aval.dtype in stochastic_rounding.HALF else r
            for r, v in zip(results, eqn.outvars, strict=True)
        ]


def _rounds(eqn: Any) -> bool:
    """Whether a conversion may lose precision: to half precision from any other number."""
    given, wanted = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return wanted in stochastic_rounding.HALF and given not in (wanted, jnp.bool_)


_SCATTERS = {"scatter-add": lax.scatter_add, "scatter_add": lax.scatter_add, "scatter-mul": lax.scatter_mul}


def _scatter(eqn: Any, values: list[Any]) -> Any:
    """Through the function: the primitive carries its sum as a jaxpr in the old dtype."""
    params = {k: eqn.params[k] for k in ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")}
    return _SCATTERS[eqn.primitive.name](*values, **params)


def _turn(words: Any, i: Any) -> Any:
    """The words of a loop's i-th turn."""
    return None if words is None else tuple(stochastic_rounding.mix(word + i * np.uint32(0x7FEB352D)) for word in words)
