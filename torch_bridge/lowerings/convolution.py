"""Convolutions of any number of spatial dims: forward, transposed, grouped, and their gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings import torch_kernels
from torch_bridge.lowerings._opmath import widen
from torch_bridge.lowerings.matmul import dot, precision_of
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten

Gradients = tuple[jax.Array | None, jax.Array | None]
"""Of input and weight, where they are wanted."""

MOST_TAPS, MOST_TAPS_OF_WEIGHT = 49, 25
"""Up to so many elements of a kernel a depthwise convolution (and the gradient of its weight) is a sum of products on CPUs, one fused loop. Other grouped
convolutions are loops over their groups there: XLA has no fast code for either. Programs that may call kernels of torch have those compute all of them: the
first step of a small ConvNeXt takes 7 s instead of 43, and the next ones a fifth of the time."""


class Window(NamedTuple):
    """How a kernel goes over its input, as XLA has it: one number (for padding a pair) for each spatial dim. lhs_dilation: the holes in the input, plus one."""

    stride: Sequence[int]
    padding: Sequence[tuple[int, int]]
    dilation: Sequence[int]
    groups: int
    lhs_dilation: Sequence[int]


class Geometry(NamedTuple):
    """A convolution as torch has it: one number for each spatial dim."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def result_shape(self, x: Sequence[int], w: Sequence[int]) -> tuple[int, ...]:
        """Of operands of these shapes."""
        sizes = [
            (i - 1) * s - 2 * p + d * (k - 1) + o + 1 if self.transposed else (i + 2 * p - d * (k - 1) - 1) // s + 1
            for i, k, s, p, d, o in zip(x[2:], w[2:], self.stride, self.padding, self.dilation, self.output_padding, strict=True)
        ]
        return x[0], w[1] * self.groups if self.transposed else w[0], *sizes

    def window(self) -> Window:
        """Of an ordinary convolution; of a transposed one that of the convolution whose adjoint it is."""
        extra = self.output_padding if self.transposed else [0] * len(self.padding)
        edges = [(p, p - e) for p, e in zip(self.padding, extra, strict=True)]
        return Window(self.stride, edges, self.dilation, self.groups, [1] * len(edges))

    def window_of_transposed(self, kernel: Sequence[int]) -> Window:
        """Of a transposed convolution, of these kernel sizes, as the convolution with holes in its input that it is."""
        reach = [d * (k - 1) for d, k in zip(self.dilation, kernel, strict=True)]
        edges = [(r - p, r - p + extra) for r, p, extra in zip(reach, self.padding, self.output_padding, strict=True)]
        return Window([1] * len(edges), edges, self.dilation, self.groups, self.stride)


def _geometry(
    n: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Geometry:
    """torch lets one number stand for all n spatial dims."""

    def per_dim(values: Sequence[int]) -> list[int]:
        return list(values) * n if len(values) == 1 else list(values)

    return Geometry(per_dim(stride), per_dim(padding), per_dim(dilation), transposed, per_dim(output_padding), groups)


def _conv(x: jax.Array, w: jax.Array, window: Window, most_taps: int = MOST_TAPS) -> jax.Array:
    if window.groups == 1:
        return _in_xla(x, w, window)
    depthwise = x.shape[1] == window.groups
    if depthwise and (math.prod(w.shape[2:]) > most_taps or not jnp.issubdtype(x.dtype, jnp.floating)):
        return _in_xla(x, w, window)
    on_cpu = _sum_of_taps if depthwise else _by_group
    return lax.platform_dependent(x, w, cpu=partial(on_cpu, window=window), default=partial(_in_xla, window=window))


def _sum_of_taps(x: jax.Array, w: jax.Array, window: Window) -> jax.Array:
    """A depthwise convolution: for each element of the kernel, the part of x that it meets times that element, in the opmath dtype."""
    stride, padding, dilation, _, lhs_dilation = window
    around = [(low, high, d - 1) for (low, high), d in zip(padding, lhs_dilation, strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *around])
    x = jnp.repeat(x, w.shape[0] // x.shape[1], axis=1)
    sizes = [(i - d * (k - 1) - 1) // s + 1 for i, k, s, d in zip(x.shape[2:], w.shape[2:], stride, dilation, strict=True)]
    found = jnp.zeros((), widen(x[:0]).dtype)
    for tap in itertools.product(*map(range, w.shape[2:])):
        starts = [t * d for t, d in zip(tap, dilation, strict=True)]
        ends = [a + s * (n - 1) + 1 for a, s, n in zip(starts, stride, sizes, strict=True)]
        met = lax.slice(x, (0, 0, *starts), (*x.shape[:2], *ends), (1, 1, *stride))
        found = found + widen(met) * widen(w[(slice(None), 0, *tap)]).reshape(1, -1, *[1] * len(sizes))
    return found.astype(x.dtype)


def _by_group(x: jax.Array, w: jax.Array, window: Window) -> jax.Array:
    """A grouped convolution as a loop over its groups."""
    groups = window.groups
    x = x.reshape(x.shape[0], groups, -1, *x.shape[2:]).swapaxes(0, 1)
    w = w.reshape(groups, -1, *w.shape[1:])

    def one(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _in_xla(*part, window._replace(groups=1))

    found = lax.map(one, (x, w)).swapaxes(0, 1)
    return found.reshape(found.shape[0], -1, *found.shape[3:])


def _in_xla(x: jax.Array, w: jax.Array, window: Window) -> jax.Array:
    n = x.ndim - 2
    spatial = "DHW"[-n:] if n <= 3 else "".join(chr(ord("a") + i) for i in range(n))
    numbers = (f"NC{spatial}", f"OI{spatial}", f"NC{spatial}")
    stride, padding, dilation, groups, lhs_dilation = window
    return lax.conv_general_dilated(
        x, w, stride, padding, lhs_dilation, dilation, numbers, feature_group_count=groups, precision=precision_of(x.dtype)
    )


def _flip_and_swap(w: jax.Array, groups: int) -> jax.Array:
    """A transposed convolution's weight [in, out/groups, ...] as that of the convolution it is: [out, in/groups, ...], reversed."""
    spatial = w.shape[2:]
    w = w.reshape(groups, w.shape[0] // groups, w.shape[1], *spatial).swapaxes(1, 2)
    return jnp.flip(w.reshape(-1, w.shape[2], *spatial), range(2, 2 + len(spatial)))


def _without_bias(x: jax.Array, w: jax.Array, g: Geometry) -> jax.Array:
    if 0 in x.shape or 0 in w.shape:
        return _empty(x, w, g)
    if _has_kernel(g, x, w):
        return lax.platform_dependent(x, w, cpu=partial(_by_torch, g=g), default=partial(_by_xla, g=g))
    return _by_xla(x, w, g)


def _by_xla(x: jax.Array, w: jax.Array, g: Geometry) -> jax.Array:
    if g.transposed:
        return _conv(x, _flip_and_swap(w, g.groups), g.window_of_transposed(w.shape[2:]))
    return _conv(x, w, g.window())


def _has_kernel(g: Geometry, *operands: jax.Array) -> bool:
    """Whether torch computes it: a grouped one of float32, in a program that may call kernels."""
    return g.groups > 1 and operands[0].dtype == jnp.float32 and torch_kernels.wanted(*operands)


def _by_torch(x: jax.Array, w: jax.Array, g: Geometry) -> jax.Array:
    out = jax.ShapeDtypeStruct(g.result_shape(x.shape, w.shape), x.dtype)
    return torch_kernels.call("convolution", (out,), x, w, geometry=_plain(g))[0]


def _plain(g: Geometry) -> tuple[Any, ...]:
    """The arguments of `aten.convolution` after the bias, as literals."""
    return tuple(v if isinstance(v, bool | int) else tuple(map(int, v)) for v in g)


def _empty(x: jax.Array, w: jax.Array, g: Geometry) -> jax.Array:
    """A convolution over nothing (an empty batch) is empty, connected to both operands for `jax.vjp`. Without channels torch's result has none either."""
    batch, channels, *sizes = g.result_shape(x.shape, w.shape)
    nothing = (jnp.sum(x) + jnp.sum(w)) * 0 if x.size == 0 and w.size == 0 else jnp.zeros((), x.dtype)
    return jnp.broadcast_to(nothing.astype(x.dtype), (batch, channels if x.shape[1] else 0, *sizes))


def _grouped(place: int) -> Callable[[Sequence[Any]], bool]:
    """Whether a call is a grouped convolution. place: of the number of groups among its arguments."""
    return lambda args: args[place] != 1


@lowering(aten.convolution.default, aten.convolution_overrideable.default, kernels=_grouped(8))
def convolution(
    input: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    out = _without_bias(input, weight, _geometry(input.ndim - 2, stride, padding, dilation, transposed, output_padding, groups))
    if bias is None or not input.shape[1]:  # without channels torch gives none
        return out
    return (widen(out) + widen(bias).reshape(-1, *[1] * (input.ndim - 2))).astype(out.dtype)


@lowering(aten._convolution.default, kernels=_grouped(8))
def _convolution(
    input: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    benchmark: bool,
    deterministic: bool,
    cudnn_enabled: bool,
    allow_tf32: bool,
) -> jax.Array:
    return convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


def _transposed(f: Callable[[jax.Array], jax.Array], operand: jax.Array, of: jax.Array, want: bool) -> jax.Array | None:
    return jax.linear_transpose(f, operand)(of)[0] if want else None


def _gradients(grad: jax.Array, x: jax.Array, w: jax.Array, g: Geometry, wanted: Sequence[bool]) -> Gradients:
    if 0 in x.shape or 0 in w.shape:
        of_x = _transposed(lambda x: _without_bias(x, w, g), x, grad, wanted[0])
        return of_x, _transposed(lambda w: _without_bias(x, w, g), w, grad, wanted[1])
    if not _has_kernel(g, grad, x, w):
        return _gradients_by_xla(grad, x, w, g, wanted)
    cpu, default = (partial(way, g=g, wanted=wanted) for way in (_gradients_by_torch, _gradients_by_xla))
    of_x, of_w = lax.platform_dependent(grad, x, w, cpu=cpu, default=default)
    return of_x, of_w


def _gradients_by_torch(grad: jax.Array, x: jax.Array, w: jax.Array, g: Geometry, wanted: Sequence[bool]) -> Gradients:
    both = bool(wanted[0]), bool(wanted[1])
    results = [jax.ShapeDtypeStruct(of.shape, of.dtype) for of, want in zip((x, w), both, strict=True) if want]
    found = iter(torch_kernels.call("convolution_gradients", results, grad, x, w, geometry=_plain(g), wanted=both) if results else ())
    return next(found) if both[0] else None, next(found) if both[1] else None


def _gradients_by_xla(grad: jax.Array, x: jax.Array, w: jax.Array, g: Geometry, wanted: Sequence[bool]) -> Gradients:
    """A convolution is linear in input and weight: transposing it runs no forward convolution.

    A transposed one, T, is the adjoint of an ordinary one, C: <grad, T(x, w)> = <C(grad, w), x>. So the gradient of x is C(grad, w), and that of w is what it
    would be for C of grad, with x as the gradient of C's result. (XLA for CPUs computes the gradient that JAX derives from T itself thirty times slower.)
    """
    window = g.window()
    if g.transposed:
        of_x = _conv(grad, w, window) if wanted[0] else None
        return of_x, _transposed(lambda w: _conv(grad, w, window, MOST_TAPS_OF_WEIGHT), w, x, wanted[1])
    of_x = _transposed(lambda x: _conv(x, w, window), x, grad, wanted[0])
    return of_x, _transposed(lambda w: _conv(x, w, window, MOST_TAPS_OF_WEIGHT), w, grad, wanted[1])


@lowering(aten.convolution_backward.default, once=True, kernels=_grouped(9))
def convolution_backward(
    grad_output: jax.Array,
    input: jax.Array,
    weight: jax.Array,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    g = _geometry(input.ndim - 2, stride, padding, dilation, transposed, output_padding, groups)
    grad_input, grad_weight = _gradients(grad_output, input, weight, g, output_mask)
    sum_dims = (0, *range(2, grad_output.ndim))
    grad_bias = jnp.sum(widen(grad_output), axis=sum_dims).astype(grad_output.dtype) if output_mask[2] else None
    return grad_input, grad_weight, grad_bias


@lowering(aten.convolution_backward_overrideable.default, kernels=_grouped(8))
def convolution_backward_overrideable(
    grad_output: jax.Array,
    input: jax.Array,
    weight: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    return convolution_backward(
        grad_output, input, weight, None, stride, padding, dilation, transposed, output_padding, groups, output_mask
    )


@lowering(aten.conv_tbc.default)
def conv_tbc(self: jax.Array, weight: jax.Array, bias: jax.Array, pad: int = 0) -> jax.Array:
    """self [T, B, C], weight [k, C, out] -> [T', B, out]: one matrix product for each of the k taps."""
    k = weight.shape[0]
    x = jnp.pad(self, ((pad, pad), (0, 0), (0, 0)))
    length = x.shape[0] - k + 1
    dims = (((2,), (0,)), ((), ()))
    taps = [dot(x[i : i + length], weight[i], dims, widen(x[:0]).dtype) for i in range(k)]
    return (sum(taps) + widen(bias)).astype(self.dtype)
