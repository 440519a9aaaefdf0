"""CTC loss: the forward recursion over time as a scan, and torch's gradient.

torch differentiates CTC on the assumption that `log_probs` comes from `log_softmax`: its gradient is
exp(log_probs) - (posterior of each label), where the true derivative by log_probs would be the second term alone. Both give
the same gradient further up; `_ctc_loss_backward` and the derivative for `to_jax` return torch's.

In `.Tensor` overloads the lengths are values, so the alphas are as wide as the targets allow (2 * targets.shape[-1] + 1) rather
than as the longest target needs; they are only ever read by the backward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array

aten = torch.ops.aten

Lengths = Any  # (N,) int array, concrete for the list overloads


def _padded_targets(targets: Array, lengths: Lengths, width: int) -> Array:
    """Targets as (N, width); a flat tensor of concatenated targets is cut up by the lengths."""
    if targets.ndim == 2:
        return jnp.pad(targets, ((0, 0), (0, max(0, width - targets.shape[1]))))[:, :width]
    starts = jnp.cumsum(lengths) - lengths
    at = starts[:, None] + jnp.arange(width)
    return targets[jnp.clip(at, 0, max(0, targets.shape[0] - 1))] if targets.shape[0] else jnp.zeros((len(lengths), width), targets.dtype)


def _labels(targets: Array, blank: int) -> Array:
    """(N, S) -> (N, 2 S + 1): blanks around every label."""
    n, width = targets.shape
    return jnp.full((n, 2 * width + 1), blank, targets.dtype).at[:, 1::2].set(targets)


def _alphas(log_probs: Array, labels: Array, input_lengths: Lengths) -> Array:
    """(N, T, 2 S + 1) log probabilities of all label prefixes by time; -inf beyond an input's length.

    A step may stay, come from the label before, or skip the blank between two different labels.
    """
    steps = log_probs.shape[0]
    emitted = jnp.take_along_axis(log_probs, jnp.broadcast_to(labels[None], (steps, *labels.shape)), axis=2)
    states = jnp.arange(labels.shape[1])
    skips = jnp.zeros(labels.shape, bool).at[:, 2:].set(labels[:, 2:] != labels[:, :-2])

    def shifted(x: Array, by: int) -> Array:
        return jnp.pad(x, ((0, 0), (by, 0)), constant_values=-jnp.inf)[:, : x.shape[1]]

    def step(alpha: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        t, emission = at
        arrive = jnp.logaddexp(jnp.logaddexp(alpha, shifted(alpha, 1)), jnp.where(skips, shifted(alpha, 2), -jnp.inf))
        arrive = jnp.where(t == 0, jnp.where(states < 2, 0.0, -jnp.inf), arrive)
        alpha = jnp.where((t < input_lengths)[:, None], arrive + emission, -jnp.inf).astype(alpha.dtype)
        return alpha, alpha

    start = jnp.full(labels.shape, -jnp.inf, log_probs.dtype)
    return jnp.moveaxis(lax.scan(step, start, (jnp.arange(steps), emitted))[1], 0, 1)


def _nll(alphas: Array, input_lengths: Lengths, target_lengths: Lengths) -> Array:
    """(N,) minus log of the last alpha at the last label or the blank behind it."""
    n, steps, _ = alphas.shape
    if steps == 0:
        return jnp.where(target_lengths == 0, 0.0, jnp.inf).astype(alphas.dtype)
    last = alphas[jnp.arange(n), jnp.maximum(input_lengths - 1, 0)]
    end = 2 * target_lengths[:, None]
    blank = jnp.take_along_axis(last, end, axis=1)[:, 0]
    label = jnp.where(target_lengths > 0, jnp.take_along_axis(last, jnp.maximum(end - 1, 0), axis=1)[:, 0], -jnp.inf)
    empty = jnp.where(target_lengths == 0, 0.0, jnp.inf)
    return jnp.where(input_lengths == 0, empty, -jnp.logaddexp(blank, label)).astype(alphas.dtype)


def _reversed_by_length(x: Array, lengths: Lengths, axis: int) -> Array:
    """Each row's first `length` entries along `axis` back to front; the rest stays."""
    at = jnp.arange(x.shape[axis])
    back = jnp.where(at < lengths[:, None], lengths[:, None] - 1 - at, at)
    shape = [x.shape[0]] + [1] * (x.ndim - 1)
    shape[axis] = x.shape[axis]
    return jnp.take_along_axis(x, back.reshape(shape), axis=axis)


def _gradient(
    grad: Array,
    log_probs: Array,
    labels: Array,
    nll: Array,
    alphas: Array,
    input_lengths: Lengths,
    target_lengths: Lengths,
    zero_infinity: bool,
) -> Array:
    """torch's gradient; beta is alpha of the time-reversed input with the reversed labels."""
    states = 2 * target_lengths + 1
    back_probs = jnp.moveaxis(_reversed_by_length(jnp.moveaxis(log_probs, 1, 0), input_lengths, 1), 0, 1)
    betas = _alphas(back_probs, _reversed_by_length(labels, states, 1), input_lengths)
    betas = _reversed_by_length(_reversed_by_length(betas, input_lengths, 1), states, 2)
    valid = jnp.arange(labels.shape[1]) < states[:, None]
    paths = jnp.where(valid[:, None], alphas + betas, -jnp.inf)  # counts the emission twice

    # log-sum-exp of the paths per class: a scatter-add shifted by the maximum of each time step.
    top = jnp.max(paths, axis=-1, keepdims=True, initial=-jnp.inf)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(paths - top)
    n, steps, _ = paths.shape
    rows, times = jnp.arange(n)[:, None, None], jnp.arange(steps)[None, :, None]
    sums = jnp.zeros((n, steps, log_probs.shape[2]), log_probs.dtype).at[rows, times, labels[:, None]].add(weights)
    probs = jnp.moveaxis(log_probs, 1, 0)
    # A class off all paths has posterior 0, whatever its log probability (also with an infinite nll).
    posterior = jnp.where(sums > 0, jnp.exp(jnp.log(sums) + top + nll[:, None, None] - probs), 0.0)
    # An impossible target has no posterior: torch's gradient is NaN, or 0 with zero_infinity.
    impossible = jnp.isinf(nll)[:, None, None]
    inside = (jnp.arange(steps) < input_lengths[:, None])[..., None]
    out = jnp.where(impossible, 0.0 if zero_infinity else jnp.nan, (jnp.exp(probs) - posterior) * grad[:, None, None])
    out = jnp.where(inside, out, 0.0)
    return jnp.moveaxis(out, 0, 1).astype(log_probs.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _loss(log_probs: Array, labels: Array, input_lengths: Lengths, target_lengths: Lengths, zero_infinity: bool) -> tuple[Array, Array]:
    alphas = _alphas(log_probs, labels, input_lengths)
    return _nll(alphas, input_lengths, target_lengths), alphas


def _loss_forward(
    log_probs: Array, labels: Array, input_lengths: Lengths, target_lengths: Lengths, zero_infinity: bool
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    out = _loss(log_probs, labels, input_lengths, target_lengths, zero_infinity)
    return out, (log_probs, labels, *out, input_lengths, target_lengths)


def _loss_backward(zero_infinity: bool, saved: Sequence[Any], grads: Sequence[Any]) -> tuple[Any, None, None, None]:
    log_probs, labels, nll, alphas, input_lengths, target_lengths = saved
    out = _gradient(grads[0], log_probs, labels, nll, alphas, input_lengths, target_lengths, zero_infinity)
    return out, None, None, None


_loss.defvjp(_loss_forward, _loss_backward)


def _prepare(targets: Array, input_lengths: Any, target_lengths: Any, blank: int) -> tuple[Array, Array, Array]:
    """Labels and both lengths as int64 arrays of size (N,), for lists (exact width) and tensors (greatest possible width; 0-d for one sequence)."""
    if hasattr(target_lengths, "shape"):
        width = targets.shape[-1]
    else:
        width = max(target_lengths, default=0)
    lengths = [
        jnp.ravel(x).astype(jnp.int64) if hasattr(x, "shape") else jnp.asarray(np.array(x, np.int64))
        for x in (input_lengths, target_lengths)
    ]
    return _labels(_padded_targets(targets, lengths[1], width).astype(jnp.int64), blank), lengths[0], lengths[1]


@lowering(aten._ctc_loss.default, aten._ctc_loss.Tensor)
def _ctc_loss(
    log_probs: Array,
    targets: Array,
    input_lengths: Array | Sequence[int],
    target_lengths: Array | Sequence[int],
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Array, Array]:
    """(T, N, C) -> negative log likelihoods (N,) and alphas. `zero_infinity` acts on the gradient only, as in torch."""
    nll, alphas = _loss(log_probs, *_prepare(targets, input_lengths, target_lengths, blank), zero_infinity)
    return nll, lax.stop_gradient(alphas)


@lowering(aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)
def _ctc_loss_backward(
    grad: Array,
    log_probs: Array,
    targets: Array,
    input_lengths: Array | Sequence[int],
    target_lengths: Array | Sequence[int],
    neg_log_likelihood: Array,
    log_alpha: Array,
    blank: int,
    zero_infinity: bool = False,
) -> Array:
    labels, input_lengths, target_lengths = _prepare(targets, input_lengths, target_lengths, blank)
    return _gradient(grad, log_probs, labels, neg_log_likelihood, log_alpha, input_lengths, target_lengths, zero_infinity)
