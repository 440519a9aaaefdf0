"""Convolutions with their channels last, as XLA's code for CPUs takes them, and what lies between them in the same order.

torch's order is [batch, channels, ...]. XLA transposes such an operand and such a result of every convolution. Here a traced function is evaluated again: a
convolution gives its result with the channels last, and elementwise ops, sums, padding, slices and so on keep that order, up to the next convolution or to a
primitive without a rule, which gets torch's order. Every element is computed as before; what is summed over several dims is added in another order.

| step on two cores, in turn | as torch has it | channels last |
|---|---|---|
| ResNet, medium (`benchmarks/zoo.py`) | 48 to 56 ms | 37 ms |
| U-Net, medium | 58 ms | 43 ms |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch import fx

from torch_bridge.compiler.permuted_values import (
    Order,
    Permuted,
    common_order,
    groups_of_reshape,
    in_torchs_order,
    lying,
    order_of,
    permuted,
    places,
    plain,
    read,
    renumbered,
)
from torch_bridge.config.settings import SETTINGS
from torch_bridge.ir import jaxprs
from torch_bridge.ir.jaxprs import bind
from torch_bridge.lowerings import torch_kernels
from torch_bridge.passes.verify import report

aten = torch.ops.aten
_CONVOLUTIONS = frozenset(
    {
        aten.convolution.default,
        aten._convolution.default,
        aten.convolution_overrideable.default,
        aten.convolution_backward.default,
        aten.convolution_backward_overrideable.default,
    }
)
FEWEST_CONVOLUTIONS = 3
"""Forward and backward, from which on it pays to evaluate a program again: between fewer there is little to keep in order."""

Rule = Callable[[Any, list[Any]], list[Any] | None]
"""Results of an equation for values some of which are `Permuted`; None: the rule does not hold here."""


def suits(graph: fx.Graph) -> bool:
    """Whether a program of this graph of aten ops is computed so."""
    return jax.default_backend() == "cpu" and sum(n.target in _CONVOLUTIONS for n in graph.nodes) >= FEWEST_CONVOLUTIONS


def evaluate(run: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """`run(*inputs)`."""
    return jaxprs.traced(run, inputs, _evaluate)


def _evaluate(jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr, in torch's order."""
    return [in_torchs_order(v) for v in jaxprs.evaluate(jaxpr, inputs, _equation)]


def _equation(eqn: Any, values: list[Any]) -> list[Any]:
    """The results of one equation, in whatever order."""
    name = eqn.primitive.name
    inner = None if name in _KEPT_CALLS else _branch_for_cpus(eqn) or jaxprs.called(eqn)
    if inner is not None:
        operands = values if name != "cond" else values[1:]
        return jaxprs.evaluate(inner, operands, _equation)
    results = None
    if name in _STARTS or any(isinstance(v, Permuted) for v in values):
        rule = _RULES.get(name)
        results = None if rule is None else rule(eqn, values)
        if results is not None and SETTINGS.verify:
            _check(eqn, results)
    if results is None:
        arrays = [in_torchs_order(v) for v in values]
        results = jaxprs.structured(eqn, arrays, lambda jaxpr, given, i: _evaluate(jaxpr, given))
        if results is None:
            results = bind(eqn, arrays)
    return results


def _branch_for_cpus(eqn: Any) -> Any:
    """What a choice by platform (`lax.platform_dependent`) computes on CPUs; None: the equation is none."""
    platforms = eqn.params.get("branches_platforms") if eqn.primitive.name == "cond" else None
    if platforms is None:
        return None
    return next((branch for branch, names in zip(eqn.params["branches"], platforms, strict=True) if names is None or "cpu" in names), None)


def _check(eqn: Any, results: Sequence[Any]) -> None:
    """Raise `VerificationError` unless the results have the shapes and dtypes that the equation gives."""
    for result, aval in zip(results, (v.aval for v in eqn.outvars), strict=True):
        order = order_of(result)
        array = read(result, order)
        if sorted(order) != list(range(aval.ndim)) or (array.shape, array.dtype) != (permuted(aval.shape, order), aval.dtype):
            found = f"{array.dtype}{list(array.shape)} in order {list(order)} for {aval.dtype}{list(aval.shape)} of {eqn.primitive.name}"
            report.fail("channels_last", "a value in another order has the same dims", found)


# -- rules -----------------------------------------------------------------------------------------


def _convolution(eqn: Any, values: list[Any]) -> list[Any]:
    numbers, (x, kernel) = eqn.params["dimension_numbers"], values
    ndim = len(numbers.lhs_spec)
    kernel_order = order_of(kernel)
    if numbers.lhs_spec == numbers.out_spec == plain(ndim):
        order = result = _last(ndim)
        out_spec = places(order, plain(ndim))
    else:  # the gradient of a kernel
        order, result, out_spec = order_of(x), plain(ndim), numbers.out_spec
    new = type(numbers)(places(order, numbers.lhs_spec), places(kernel_order, numbers.rhs_spec), out_spec)
    return [lying(r, result) for r in bind(eqn, [read(x, order), read(kernel, kernel_order)], dimension_numbers=new)]


def _kernel_of_torch(eqn: Any, values: list[Any]) -> list[Any] | None:
    """A call of a kernel that takes images with their channels last (`torch_kernels.kernel`)."""
    images = torch_kernels.images_of(eqn)
    if images is None:
        return None
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    orders = [_last(a.ndim) if image else plain(a.ndim) for a, image in zip(avals, (*images[0], *images[1]), strict=True)]
    results = torch_kernels.call_lying(eqn, list(map(read, values, orders)), orders)
    return list(map(lying, results, orders[len(values) :]))


def _last(ndim: int) -> Order:
    """The order of an image with its channels last."""
    return (0, *range(2, ndim), 1)


def _elementwise(eqn: Any, values: list[Any]) -> list[Any] | None:
    ndim = eqn.outvars[0].aval.ndim
    order = common_order(values, ndim)
    if order is None:
        return None
    arrays = [read(v, order) if len(order_of(v)) == ndim else in_torchs_order(v) for v in values]
    return [lying(r, order) for r in bind(eqn, arrays)]


def _broadcast(eqn: Any, values: list[Any]) -> list[Any] | None:
    operand, shape, dims = values[0], eqn.params["shape"], eqn.params["broadcast_dimensions"]
    if len(values) != 1 or len(shape) < 3 or eqn.params.get("sharding") is not None:
        return None

    def make(order: Order) -> Any:
        of_operand = tuple(sorted(range(len(dims)), key=lambda i: order.index(dims[i])))
        new_dims = places(order, [dims[i] for i in of_operand])
        return bind(eqn, [read(operand, of_operand)], shape=permuted(shape, order), broadcast_dimensions=new_dims)[0]

    # a new dim lies next to the one before it
    own = [dims[i] for i in order_of(operand)]
    for d in range(len(shape)):
        if d not in dims:
            own.insert(own.index(d - 1) + 1 if d else 0, d)
    return [Permuted(tuple(own), make, free=True)]


def _reduce(eqn: Any, values: list[Any]) -> list[Any]:
    order, axes = order_of(values[0]), eqn.params["axes"]
    left = renumbered([d for d in order if d not in axes])
    return [lying(r, left) for r in bind(eqn, [read(values[0], order)], axes=tuple(sorted(places(order, axes))))]


def _squeeze(eqn: Any, values: list[Any]) -> list[Any]:
    order, dims = order_of(values[0]), eqn.params["dimensions"]
    left = renumbered([d for d in order if d not in dims])
    return [lying(r, left) for r in bind(eqn, [read(values[0], order)], dimensions=tuple(sorted(places(order, dims))))]


def _transpose(eqn: Any, values: list[Any]) -> list[Any]:
    order, permutation = order_of(values[0]), eqn.params["permutation"]
    return [lying(read(values[0], order), places(permutation, order))]


def _along(name: str) -> Rule:
    """Of a primitive one parameter of which is a dim."""

    def rule(eqn: Any, values: list[Any]) -> list[Any]:
        order = common_order(values, eqn.invars[0].aval.ndim) or plain(eqn.invars[0].aval.ndim)
        return [lying(r, order) for r in bind(eqn, [read(v, order) for v in values], **{name: order.index(eqn.params[name])})]

    return rule


def _reverse(eqn: Any, values: list[Any]) -> list[Any]:
    order = order_of(values[0])
    return [lying(r, order) for r in bind(eqn, [read(values[0], order)], dimensions=places(order, eqn.params["dimensions"]))]


def _each_dim(*names: str) -> Rule:
    """Of a primitive with parameters that say something of each dim of its first operand and its result. Other operands are numbers."""

    def rule(eqn: Any, values: list[Any]) -> list[Any]:
        order = order_of(values[0])
        changed = {name: permuted(eqn.params[name], order) for name in names if eqn.params.get(name) is not None}
        arrays = [read(values[0], order), *map(in_torchs_order, values[1:])]
        return [lying(r, order) for r in bind(eqn, arrays, **changed)]

    return rule


def _dynamic_slice(eqn: Any, values: list[Any]) -> list[Any]:
    order = order_of(values[0])
    starts = permuted([in_torchs_order(v) for v in values[1:]], order)
    return [lying(r, order) for r in bind(eqn, [read(values[0], order), *starts], slice_sizes=permuted(eqn.params["slice_sizes"], order))]


def _reshape(eqn: Any, values: list[Any]) -> list[Any] | None:
    """Dims may be split, and those merged that lie together in torch's order."""
    old, new = eqn.invars[0].aval.shape, eqn.params["new_sizes"]
    groups = groups_of_reshape(old, new)
    if len(values) != 1 or groups is None or any(eqn.params.get(name) is not None for name in ("dimensions", "sharding")):
        return None
    order = order_of(values[0])
    result: list[int] = []
    for before, after in sorted(groups, key=lambda group: order.index(group[0][0]) if group[0] else -1):
        if before and order[order.index(before[0]) :][: len(before)] != before:
            return None
        result += after
    return [lying(r, tuple(result)) for r in bind(eqn, [read(values[0], order)], new_sizes=permuted(new, tuple(result)))]


def _dot_general(eqn: Any, values: list[Any]) -> list[Any]:
    contracted, batch = eqn.params["dimension_numbers"]
    orders = [order_of(v) for v in values]
    numbers = tuple(tuple(places(o, dims) for o, dims in zip(orders, pair, strict=True)) for pair in (contracted, batch))
    result = list(plain(len(batch[0])))
    for order, *used in zip(orders, contracted, batch, strict=True):  # after the batch, what is left of either operand
        left = renumbered([d for d in order if not any(d in dims for dims in used)])
        result += [len(result) + d for d in left]
    arrays = [read(v, o) for v, o in zip(values, orders, strict=True)]
    return [lying(r, tuple(result)) for r in bind(eqn, arrays, dimension_numbers=numbers)]


def _each_operand(eqn: Any, values: list[Any]) -> list[Any] | None:
    """Of a primitive with a result for each operand, of the same shape. Not of a sum over dims, which `jax.vmap(axis_name=)` makes of one over a mesh axis."""
    if any(isinstance(axis, int) for axis in eqn.params.get("axes", ())):
        return None
    orders = [order_of(v) for v in values]
    results = bind(eqn, [read(v, o) for v, o in zip(values, orders, strict=True)])
    return [lying(r, o) for r, o in zip(results, orders, strict=True)]


_ELEMENTWISE = frozenset(
    {
        "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp",
        "complex", "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1",
        "floor", "ge", "gt", "igamma", "igammac", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul",
        "ne", "neg", "nextafter", "not", "or", "polygamma", "population_count", "pow", "real", "reduce_precision", "regularized_incomplete_beta", "rem",
        "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient",
        "sub", "tan", "tanh", "xor", "zeta"
    }
)  # fmt: skip
_WINDOW = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"), _reduce
    ),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "split"), _along("axis")),
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _each_dim(*_WINDOW)),
    **dict.fromkeys(("optimization_barrier", "psum", "psum_invariant", "pmax", "pmin", "pvary", "pcast"), _each_operand),
    "broadcast_in_dim": _broadcast,
    "concatenate": _along("dimension"),
    "conv_general_dilated": _convolution,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "ffi_call": _kernel_of_torch,
    "pad": _each_dim("padding_config"),
    "reshape": _reshape,
    "rev": _reverse,
    "slice": _each_dim("start_indices", "limit_indices", "strides"),
    "squeeze": _squeeze,
    "transpose": _transpose,
}
_STARTS = frozenset({"broadcast_in_dim", "conv_general_dilated", "ffi_call"})
"""What is computed in another order though no operand is."""
_KEPT_CALLS = frozenset({"remat", "remat2", "checkpoint", "custom_vmap_call"})
"""Calls that are more than that: what they compute is computed again where it is needed, or in another way."""
