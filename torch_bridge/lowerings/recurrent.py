"""The fused LSTM and GRU cells, which torch reaches on devices like "xla", and their backward ops.

`workspace` carries the activated gates from forward to backward: torch's layout [batch, 4 * hidden] (i, f, g, o) for LSTM and
[batch, 5 * hidden] (r, z, n, h, hidden part of n) for GRU.

On CPUs a cell is a loop of its own (`stored`): XLA would compute a state anew, from the first step on, wherever one of the next steps reads it. 40 steps of an
LSTM cell took 30 s to compile, and take 7.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_bridge.lowerings import stored
from torch_bridge.lowerings._opmath import widen
from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten
OptArray = jax.Array | None


def _biased(gates: jax.Array, bias: OptArray) -> jax.Array:
    return widen(gates) if bias is None else widen(gates) + widen(bias)


@lowering(aten._thnn_fused_lstm_cell.default)
def fused_lstm_cell(
    input_gates: jax.Array, hidden_gates: jax.Array, cx: jax.Array, input_bias: OptArray = None, hidden_bias: OptArray = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    found: tuple[jax.Array, jax.Array, jax.Array] = stored.on_cpus(_lstm_cell, input_gates, hidden_gates, cx, input_bias, hidden_bias)
    return found


def _lstm_cell(
    input_gates: jax.Array, hidden_gates: jax.Array, cx: jax.Array, input_bias: OptArray, hidden_bias: OptArray
) -> tuple[jax.Array, jax.Array, jax.Array]:
    gates = _biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)
    i, f, g, o = jnp.split(gates, 4, axis=1)
    i, f, g, o = lax.logistic(i), lax.logistic(f), jnp.tanh(g), lax.logistic(o)
    cy = f * widen(cx) + i * g
    hy = o * jnp.tanh(cy)
    dtype = cx.dtype
    return hy.astype(dtype), cy.astype(dtype), jnp.concatenate([i, f, g, o], axis=1).astype(dtype)


@lowering(aten._thnn_fused_lstm_cell_backward_impl.default)
def fused_lstm_cell_backward(
    grad_hy: OptArray, grad_cy: OptArray, cx: jax.Array, cy: jax.Array, workspace: jax.Array, has_bias: bool
) -> tuple[OptArray, ...]:
    """Gradients of the gates, of cx, and of either bias (both have the same)."""
    found: tuple[OptArray, ...] = stored.on_cpus(_LSTM_BACKWARD[has_bias], grad_hy, grad_cy, cx, cy, workspace)
    return found


def _lstm_cell_backward(
    has_bias: bool, grad_hy: OptArray, grad_cy: OptArray, cx: jax.Array, cy: jax.Array, workspace: jax.Array
) -> tuple[OptArray, ...]:
    i, f, g, o = jnp.split(widen(workspace), 4, axis=1)
    gh = jnp.zeros_like(i) if grad_hy is None else widen(grad_hy)
    gc = jnp.zeros_like(i) if grad_cy is None else widen(grad_cy)
    t = jnp.tanh(widen(cy))
    gc = gc + gh * o * (1 - t * t)
    parts = [gc * g * i * (1 - i), gc * widen(cx) * f * (1 - f), gc * i * (1 - g * g), gh * t * o * (1 - o)]
    grad_gates = jnp.concatenate(parts, axis=1)
    grad_bias = jnp.sum(grad_gates, axis=0).astype(cx.dtype) if has_bias else None
    return grad_gates.astype(cx.dtype), (gc * f).astype(cx.dtype), grad_bias


_LSTM_BACKWARD = {has_bias: functools.partial(_lstm_cell_backward, has_bias) for has_bias in (False, True)}


@lowering(aten._thnn_fused_gru_cell.default)
def fused_gru_cell(
    input_gates: jax.Array, hidden_gates: jax.Array, hx: jax.Array, input_bias: OptArray = None, hidden_bias: OptArray = None
) -> tuple[jax.Array, jax.Array]:
    found: tuple[jax.Array, jax.Array] = stored.on_cpus(_gru_cell, input_gates, hidden_gates, hx, input_bias, hidden_bias)
    return found


def _gru_cell(
    input_gates: jax.Array, hidden_gates: jax.Array, hx: jax.Array, input_bias: OptArray, hidden_bias: OptArray
) -> tuple[jax.Array, jax.Array]:
    ir, iz, in_ = jnp.split(_biased(input_gates, input_bias), 3, axis=1)
    hr, hz, hn = jnp.split(_biased(hidden_gates, hidden_bias), 3, axis=1)
    h = widen(hx)
    r, z = lax.logistic(ir + hr), lax.logistic(iz + hz)
    n = jnp.tanh(in_ + r * hn)
    hy = n + z * (h - n)
    return hy.astype(hx.dtype), jnp.concatenate([r, z, n, h, hn], axis=1).astype(hx.dtype)


@lowering(aten._thnn_fused_gru_cell_backward.default)
def fused_gru_cell_backward(grad_hy: jax.Array, workspace: jax.Array, has_bias: bool) -> tuple[OptArray, ...]:
    """Gradients of input gates, hidden gates, hx, input bias, hidden bias."""
    found: tuple[OptArray, ...] = stored.on_cpus(_GRU_BACKWARD[has_bias], grad_hy, workspace)
    return found


def _gru_cell_backward(has_bias: bool, grad_hy: jax.Array, workspace: jax.Array) -> tuple[OptArray, ...]:
    r, z, n, h, hn = jnp.split(widen(workspace), 5, axis=1)
    g = widen(grad_hy)
    gz = g * (h - n) * z * (1 - z)
    gn = g * (1 - z) * (1 - n * n)
    gr = gn * hn * r * (1 - r)
    grad_input = jnp.concatenate([gr, gz, gn], axis=1)
    grad_hidden = jnp.concatenate([gr, gz, gn * r], axis=1)
    biases = [jnp.sum(x, axis=0) if has_bias else None for x in (grad_input, grad_hidden)]
    return tuple(None if x is None else x.astype(grad_hy.dtype) for x in (grad_input, grad_hidden, g * z, *biases))


_GRU_BACKWARD = {has_bias: functools.partial(_gru_cell_backward, has_bias) for has_bias in (False, True)}
