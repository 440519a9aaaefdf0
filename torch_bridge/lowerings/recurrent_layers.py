"""One layer of an LSTM, GRU or RNN over all time steps, in one direction, as `lax.scan`, and its gradients.

Every array has time first. With a `mask` [T, B, 1] sequences may be of different lengths: where it is false the state stays as it is, so that each
sequence's last state is that of its last step, in either direction. What a layer computes of its inputs alone is done before the loop, and what
gradients of weights need is summed over all steps at once after it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from torch_bridge.lowerings import stored
from torch_bridge.lowerings._opmath import widen
from torch_bridge.lowerings.matmul import mm
from torch_bridge.lowerings.recurrent import fused_gru_cell, fused_gru_cell_backward, fused_lstm_cell, fused_lstm_cell_backward

OptArray = jax.Array | None
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Kinds of layers, with how many hidden sizes wide their gates are."""
KEPT = {"lstm": 4, "gru": 5, "rnn_tanh": 0, "rnn_relu": 0}
"""How many hidden sizes of a step a layer keeps for its gradients, beside its states."""


class Weights(NamedTuple):
    """hh: [gates, P]; bias_ih, bias_hh: [gates]; hr: [P, H], the projection of an LSTM. P is H without a projection."""

    hh: jax.Array
    bias_ih: OptArray
    bias_hh: OptArray
    hr: OptArray


class States(NamedTuple):
    """Of all steps, in the order of time: h: [T, B, P]; c: [T, B, H] of an LSTM, else of no elements; kept: [T, B, KEPT * H]."""

    h: jax.Array
    c: jax.Array
    kept: jax.Array


def forward(
    kind: str, gates: jax.Array, h0: jax.Array, c0: OptArray, weights: Weights, mask: OptArray, reverse: bool
) -> tuple[States, jax.Array, jax.Array]:
    """The states of all steps, and the last h and c. gates: [T, B, gates], the input's part of them without a bias."""
    turned = weights.hh.T
    projection = None if weights.hr is None else weights.hr.T
    empty = jnp.zeros((0,), h0.dtype)

    def step(carry: tuple[jax.Array, jax.Array], given: tuple[jax.Array, OptArray]) -> tuple[tuple[jax.Array, jax.Array], States]:
        h, c = carry
        own, active = given
        hidden = mm(h, turned)
        if kind == "lstm":
            new_h, new_c, kept = fused_lstm_cell(own, hidden, c, weights.bias_ih, weights.bias_hh)
            new_h = new_h if projection is None else mm(new_h, projection)
        elif kind == "gru":
            new_h, kept = fused_gru_cell(own, hidden, h, weights.bias_ih, weights.bias_hh)
            new_c = c
        else:
            new_h, new_c, kept = _activate(kind, own, hidden, weights), c, empty
        if active is not None:
            new_h = jnp.where(active, new_h, h)
            new_c = jnp.where(active, new_c, c) if c.size else c
        return (new_h, new_c), States(new_h, new_c, kept)

    (h, c), states = lax.scan(step, (h0, empty if c0 is None else c0), (gates, mask), reverse=reverse)
    return states, h, c


def _activate(kind: str, own: jax.Array, hidden: jax.Array, weights: Weights) -> jax.Array:
    total = widen(own) + widen(hidden)
    for bias in (weights.bias_ih, weights.bias_hh):
        total = total if bias is None else total + widen(bias)
    return (jnp.tanh(total) if kind == "rnn_tanh" else jnp.maximum(total, 0)).astype(own.dtype)


class Gradients(NamedTuple):
    """As what they are gradients of. c0, bias_ih, bias_hh and hr: None where the layer has none."""

    gates: jax.Array
    h0: jax.Array
    c0: OptArray
    hh: jax.Array
    bias_ih: OptArray
    bias_hh: OptArray
    hr: OptArray


def backward(
    kind: str,
    grads: tuple[jax.Array, jax.Array, jax.Array],
    states: States,
    h0: jax.Array,
    c0: OptArray,
    weights: Weights,
    mask: OptArray,
    reverse: bool,
) -> Gradients:
    """Gradients of a layer. grads: of the h of all steps, of the last h and of the last c."""
    grad_all, grad_h, grad_c = grads
    before_h = _before(states.h, h0, reverse)
    before_c = _before(states.c, c0, reverse) if c0 is not None else states.c

    def step(
        carry: tuple[jax.Array, jax.Array], given: tuple[jax.Array, States, jax.Array, OptArray]
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
        dh, dc = carry
        own, state, c_before, active = given
        dh = dh + own
        if kind == "lstm":
            inner = dh if weights.hr is None else mm(dh, weights.hr)
            d_own, dc_before, _ = fused_lstm_cell_backward(inner, dc, c_before, state.c, state.kept, False)
            assert d_own is not None and dc_before is not None
            d_hidden, dh_before = d_own, mm(d_own, weights.hh)
        elif kind == "gru":
            d_own, d_hidden, direct, *_ = fused_gru_cell_backward(dh, state.kept, False)
            assert d_own is not None and d_hidden is not None and direct is not None
            dh_before, dc_before = mm(d_hidden, weights.hh) + direct, dc
        else:
            y = widen(state.h)
            slope = 1 - y * y if kind == "rnn_tanh" else (y > 0).astype(y.dtype)
            d_own = d_hidden = (widen(dh) * slope).astype(dh.dtype)
            dh_before, dc_before = mm(d_own, weights.hh), dc
        d_projected = dh
        if active is not None:
            zero = jnp.zeros((), dh.dtype)
            d_own, d_hidden, d_projected = (jnp.where(active, x, zero) for x in (d_own, d_hidden, dh))
            dh_before = jnp.where(active, dh_before, dh)
            dc_before = jnp.where(active, dc_before, dc) if dc.size else dc
        return (dh_before, dc_before), (d_own, d_hidden, d_projected)

    start = (grad_h, grad_c if c0 is not None else jnp.zeros((0,), h0.dtype))
    (dh0, dc0), (d_own, d_hidden, d_projected) = lax.scan(step, start, (grad_all, states, before_c, mask), reverse=not reverse)
    return Gradients(
        gates=d_own,
        h0=dh0,
        c0=None if c0 is None else dc0,
        hh=_over_steps(d_hidden, before_h),
        bias_ih=None if weights.bias_ih is None else _sum(d_own),
        bias_hh=None if weights.bias_hh is None else _sum(d_hidden),
        hr=None if weights.hr is None else _over_steps(d_projected, _unprojected(states)),
    )


def _before(states: jax.Array, first: jax.Array, reverse: bool) -> jax.Array:
    """The state that each step starts from."""
    return jnp.concatenate([states[1:], first[None]] if reverse else [first[None], states[:-1]])


def _unprojected(states: States) -> jax.Array:
    """What an LSTM projects in each step."""
    o = jnp.split(widen(states.kept), 4, axis=-1)[3]
    return (o * jnp.tanh(widen(states.c))).astype(states.c.dtype)


def _over_steps(left: jax.Array, right: jax.Array) -> jax.Array:
    """The sum over all steps of left^T right."""
    return mm(stored.transposed(left.reshape(-1, left.shape[-1])), right.reshape(-1, right.shape[-1]))


def _sum(x: jax.Array) -> jax.Array:
    return jnp.sum(widen(x), axis=(0, 1)).astype(x.dtype)
