"""`linear_cross_entropy` in chunks: the loss of a projection to many classes, and its gradients, without all logits at once.

N rows, C classes, F features. torch 2.13 and newer have the ops.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge import _compat
from torch_bridge.lowerings._opmath import widen
from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array, DType


def _row_weights(target_N: Array, class_weight: Array | None, ignore_index: int, dtype: DType) -> Array:
    """The weight of each row's class, 0 for ignored rows."""
    kept = target_N != ignore_index
    of_class = jnp.ones((), dtype) if class_weight is None else class_weight.astype(dtype)[jnp.where(kept, target_N, 0)]
    return jnp.where(kept, of_class, 0)


def _log_probabilities(x_NF: Array, weight_CF: Array, bias_C: Array | None) -> Array:
    logits_NC = x_NF @ weight_CF.T
    return jax.nn.log_softmax(logits_NC if bias_C is None else logits_NC + bias_C, axis=-1)


def _picked(x_NC: Array, target_N: Array) -> Array:
    """Each row's element of its target class (ignored rows: some element; their weight is 0)."""
    at = jnp.clip(target_N, 0, x_NC.shape[1] - 1)
    return jnp.take_along_axis(x_NC, at[:, None], axis=1)[:, 0]


def _chunks(x: Array, size: int) -> Array:
    """[n, ...] as [chunks, size, ...], filled up with zeros."""
    missing = -x.shape[0] % size
    return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, size, *x.shape[1:])


def _chunked(
    input: Array,
    linear_weight: Array,
    target: Array,
    linear_bias: Array | None,
    weight: Array | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    batch_chunk_size: int,
    acc_policy: str,
    acc_dtype: torch.dtype,
    allow_retain_graph: bool,
    compute_input_grad: bool,
    compute_linear_weight_grad: bool,
    compute_linear_bias_grad: bool,
) -> tuple[Array, Array, Array, Array]:
    """The summed or averaged loss and its gradients with respect to input, weight and bias; those not asked for are empty."""
    if label_smoothing > 0:
        raise NotImplementedError(
            "linear_cross_entropy does not support label smoothing in chunks, here as on the CPU: use F.cross_entropy"
        )
    x_NF, w_CF, b_C = widen(input), widen(linear_weight), widen(linear_bias)
    scale_N = _row_weights(target, weight, ignore_index, x_NF.dtype)
    if reduction == "mean":
        scale_N = scale_N / scale_N.sum()
    size = max(1, min(batch_chunk_size, x_NF.shape[0]))

    def step(carry: tuple[Array, Array, Array], chunk: tuple[Array, ...]) -> tuple[tuple[Array, Array, Array], Array]:
        loss, grad_w, grad_b = carry
        x, t, scale = chunk
        log_p = _log_probabilities(x, w_CF, b_C)
        loss = loss - jnp.sum(scale * _picked(log_p, t))
        hit = (t[:, None] == jnp.arange(w_CF.shape[0])).astype(x.dtype)
        grad_logits = (jnp.exp(log_p) - hit) * scale[:, None]
        grad_w = grad_w + grad_logits.T @ x if compute_linear_weight_grad else grad_w
        grad_b = grad_b + grad_logits.sum(0) if compute_linear_bias_grad else grad_b
        return (loss, grad_w, grad_b), grad_logits @ w_CF if compute_input_grad else jnp.zeros((0, 0), x.dtype)

    zeros = (
        jnp.full((), jnp.nan if reduction == "mean" and not x_NF.shape[0] else 0.0, x_NF.dtype),
        jnp.zeros(w_CF.shape if compute_linear_weight_grad else (0, 0), x_NF.dtype),
        jnp.zeros(w_CF.shape[:1] if compute_linear_bias_grad else (0,), x_NF.dtype),
    )
    (loss, grad_w, grad_b), grad_x = lax.scan(step, zeros, tuple(_chunks(v, size) for v in (x_NF, target, scale_N)))
    grad_x = grad_x.reshape(-1, x_NF.shape[1])[: x_NF.shape[0]] if compute_input_grad else jnp.zeros((0, 0), x_NF.dtype)
    return loss.astype(input.dtype), grad_x.astype(input.dtype), grad_w.astype(input.dtype), grad_b.astype(input.dtype)


def _without_reduction(
    input: Array,
    linear_weight: Array,
    target: Array,
    linear_bias: Array | None,
    weight: Array | None,
    ignore_index: int,
    batch_chunk_size: int,
    acc_policy: str,
    acc_dtype: torch.dtype,
) -> Array:
    """Each row's loss; torch's own backward works out the gradients chunk by chunk from recorded ops."""
    x_NF, w_CF, b_C = widen(input), widen(linear_weight), widen(linear_bias)
    scale_N = _row_weights(target, weight, ignore_index, x_NF.dtype)
    size = max(1, min(batch_chunk_size, x_NF.shape[0]))

    def of_chunk(chunk: tuple[Array, ...]) -> Array:
        x, t, scale = chunk
        return -scale * _picked(_log_probabilities(x, w_CF, b_C), t)

    loss = lax.map(of_chunk, tuple(_chunks(v, size) for v in (x_NF, target, scale_N)))
    return loss.reshape(-1)[: x_NF.shape[0]].astype(input.dtype)


if _compat.linear_cross_entropy_ops() is not None:
    _reduced_op, _unreduced_op = _compat.linear_cross_entropy_ops()  # type: ignore[misc]
    lowering(_reduced_op)(_chunked)
    lowering(_unreduced_op)(_without_reduction)
