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

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torch_bridge.precision import stochastic_rounding

BITS = {"bf16": (8, 7), "fp16": (5, 10), "tf32": (8, 10), "fp8_e4m3": (4, 3)}
"""Exponent and mantissa bits of what `--auto-cast-type` may be."""

HALF = {"bf16": jnp.dtype(jnp.bfloat16), "fp16": jnp.dtype(jnp.float16)}
"""Those among them that are dtypes in which XLA multiplies."""

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat": "jaxpr", "remat2": "jaxpr",
          "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr",
          "custom_vmap_call": "call"}  # fmt: skip

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
    closed, shape = jax.make_jaxpr(run, return_shape=True)(*inputs)
    pair = None if words is None else (words[0], words[1])
    flat = _Evaluation(matmul, places).run(closed.jaxpr, closed.consts, jax.tree.leaves(tuple(inputs)), pair)
    return jax.tree.unflatten(jax.tree.structure(shape), flat)


class _Evaluation:
    """One walk through a jaxpr. It counts the roundings, which each get random numbers of their own."""

    def __init__(self, matmul: str | None, places: Sequence[Any]):
        self.matmul = matmul
        self.places = places
        self.count = 0

    def run(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], words: Any) -> list[Any]:
        """The values of the jaxpr's results."""
        from jax.extend import core  # brings Pallas in

        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

        def read(v: Any) -> Any:
            return jnp.asarray(v.val, v.aval.dtype) if isinstance(v, core.Literal) else env[v]  # type: ignore[attr-defined]

        for eqn in jaxpr.eqns:
            with jax.named_scope(str(eqn.source_info.name_stack)):
                results = self.equation(eqn, [read(v) for v in eqn.invars], words)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, values: list[Any], words: Any) -> list[Any]:
        """The results of one equation, as a list."""
        name = eqn.primitive.name
        if name in _CALLS:
            inner = eqn.params[_CALLS[name]]
            return self.run(*_parts(inner), values, words)
        if name in _STRUCTURED:
            return _STRUCTURED[name](self, eqn.params, values, words)
        if words is not None and name == "convert_element_type" and _rounds(eqn):
            return [self.rounded(values[0].astype(jnp.float32), eqn.outvars[0].aval.dtype, words)]
        if self.matmul is not None and name in _PRODUCTS and all(v.aval.dtype == jnp.float32 for v in eqn.invars[:2]):
            return _bind(eqn, [*(self.operand(v, words) for v in values[:2]), *values[2:]], preferred_element_type=jnp.dtype(jnp.float32))
        if words is not None and name in _ARITHMETIC and eqn.outvars[0].aval.dtype in stochastic_rounding.HALF:
            return self.in_float32(eqn, values, words)
        return _bind(eqn, values)

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
            results = _bind(eqn, wide, preferred_element_type=jnp.dtype(jnp.float32))
        else:
            results = _bind(eqn, wide)
        return [
            self.rounded(r, v.aval.dtype, words) if v.aval.dtype in stochastic_rounding.HALF else r
            for r, v in zip(results, eqn.outvars, strict=True)
        ]


def _parts(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr and its constants, from an open or a closed one."""
    from jax.extend import core

    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, core.ClosedJaxpr) else (jaxpr, ())


def _rounds(eqn: Any) -> bool:
    """Whether a conversion may lose precision: to half precision from any other number."""
    given, wanted = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return wanted in stochastic_rounding.HALF and given not in (wanted, jnp.bool_)


def _bind(eqn: Any, values: list[Any], **changed: Any) -> list[Any]:
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    results = eqn.primitive.bind(*values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


_SCATTERS = {"scatter-add": lax.scatter_add, "scatter_add": lax.scatter_add, "scatter-mul": lax.scatter_mul}


def _scatter(eqn: Any, values: list[Any]) -> Any:
    """Through the function: the primitive carries its sum as a jaxpr in the old dtype."""
    params = {k: eqn.params[k] for k in ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")}
    return _SCATTERS[eqn.primitive.name](*values, **params)


# -- loops and branches ----------------------------------------------------------------------------


def _turn(words: Any, i: Any) -> Any:
    """The words of a loop's i-th turn."""
    return None if words is None else tuple(stochastic_rounding.mix(word + i * np.uint32(0x7FEB352D)) for word in words)


def _scan(self: _Evaluation, params: Any, values: list[Any], words: Any) -> list[Any]:
    n_consts, n_carry = params["num_consts"], params["num_carry"]
    consts, carry, xs = values[:n_consts], values[n_consts : n_consts + n_carry], values[n_consts + n_carry :]
    jaxpr, closed_over = _parts(params["jaxpr"])

    def body(state: Any, x: Any) -> Any:
        i, *own = state
        results = self.run(jaxpr, closed_over, [*consts, *own, *x], _turn(words, i))
        return (i + np.uint32(1), *results[:n_carry]), results[n_carry:]

    start = (jnp.uint32(0), *carry)
    (_, *last), stacked = lax.scan(body, start, xs, length=params["length"], reverse=params["reverse"], unroll=params["unroll"])
    return [*last, *stacked]


def _while(self: _Evaluation, params: Any, values: list[Any], words: Any) -> list[Any]:
    n_test, n_body = params["cond_nconsts"], params["body_nconsts"]
    of_test, of_body, start = values[:n_test], values[n_test : n_test + n_body], values[n_test + n_body :]
    test, body = _parts(params["cond_jaxpr"]), _parts(params["body_jaxpr"])

    def goes_on(state: Any) -> Any:
        return self.run(*test, [*of_test, *state[1:]], _turn(words, state[0]))[0]

    def turn(state: Any) -> Any:
        return (state[0] + np.uint32(1), *self.run(*body, [*of_body, *state[1:]], _turn(words, state[0])))

    return list(lax.while_loop(goes_on, turn, (jnp.uint32(0), *start))[1:])


def _cond(self: _Evaluation, params: Any, values: list[Any], words: Any) -> list[Any]:
    def branch(jaxpr: Any) -> Callable[..., Any]:
        return lambda *operands: self.run(*_parts(jaxpr), operands, words)

    return list(lax.switch(values[0], [branch(j) for j in params["branches"]], *values[1:]))


_STRUCTURED: dict[str, Callable[[_Evaluation, Any, list[Any], Any], list[Any]]] = {"scan": _scan, "while": _while, "cond": _cond}
