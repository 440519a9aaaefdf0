"""The op of one recurrent layer in one direction over all time steps, and its gradients.

It has a loop as its lowering (`lowerings.recurrent_layers`). On the CPU, where recorded graphs may run in eager torch, it is torch's ops step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch

from torch_bridge import _compat
from torch_bridge.lowerings import lowering, recurrent_layers
from torch_bridge.lowerings.recurrent_layers import GATES, KEPT, States, Weights
from torch_bridge.runtime import transfer

OptTensor = torch.Tensor | None

_WEIGHTS = "Tensor weight_hh, Tensor? bias_ih, Tensor? bias_hh, Tensor? weight_hr, Tensor? mask, bool reverse"
_library = torch.library.Library("torch_bridge", "FRAGMENT")
_library.define(f"recurrent_layer(str kind, Tensor gates, Tensor h0, Tensor? c0, {_WEIGHTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
_library.define(
    f"recurrent_layer_backward(str kind, Tensor grad_all, Tensor grad_h, Tensor grad_c, Tensor all_h, Tensor all_c, Tensor kept, Tensor h0, Tensor? c0, "
    f"{_WEIGHTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
ops = torch.ops.torch_bridge

# -- the op, its shapes, and what it is on the CPU -----------------------------------------------------


def _forward_meta(kind: str, gates: torch.Tensor, h0: torch.Tensor, c0: OptTensor, *_: Any) -> tuple[torch.Tensor, ...]:
    steps, batch, width = gates.shape
    hidden = width // GATES[kind]
    all_c = h0.new_empty(steps, 0) if c0 is None else h0.new_empty(steps, batch, hidden)
    kept = h0.new_empty(steps, batch, KEPT[kind] * hidden) if KEPT[kind] else h0.new_empty(steps, 0)
    return h0.new_empty(steps, *h0.shape), all_c, kept, h0.new_empty(h0.shape), h0.new_empty(0 if c0 is None else c0.shape)


def _backward_meta(
    kind: str,
    grad_all: torch.Tensor,
    grad_h: torch.Tensor,
    grad_c: torch.Tensor,
    all_h: torch.Tensor,
    all_c: torch.Tensor,
    kept: torch.Tensor,
    h0: torch.Tensor,
    c0: OptTensor,
    weight_hh: torch.Tensor,
    bias_ih: OptTensor,
    bias_hh: OptTensor,
    weight_hr: OptTensor,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    made = [all_h.new_empty(*all_h.shape[:2], weight_hh.shape[0])]
    return (*made, *(h0.new_empty(0) if x is None else x.new_empty(x.shape) for x in (h0, c0, weight_hh, bias_ih, bias_hh, weight_hr)))


def _step_by_step(
    kind: str,
    gates: torch.Tensor,
    h0: torch.Tensor,
    c0: OptTensor,
    weight_hh: torch.Tensor,
    bias_ih: OptTensor,
    bias_hh: OptTensor,
    weight_hr: OptTensor,
    mask: OptTensor,
    reverse: bool,
) -> tuple[torch.Tensor, ...]:
    """The op in torch's ops, which have gradients of any order: h and c of all steps, what is kept, the last h and c."""
    h, c = h0, c0
    all_h: list[torch.Tensor] = []
    all_c: list[torch.Tensor] = []
    all_kept: list[torch.Tensor] = []
    steps = range(gates.shape[0])
    for t in reversed(steps) if reverse else steps:
        own = gates[t] if bias_ih is None else gates[t] + bias_ih
        hidden = torch.nn.functional.linear(h, weight_hh, bias_hh)
        new_c = c
        if kind == "lstm":
            assert c is not None
            i, f, g, o = (own + hidden).chunk(4, 1)
            i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
            new_c = f * c + i * g
            new_h = o * new_c.tanh()
            new_h = new_h if weight_hr is None else torch.nn.functional.linear(new_h, weight_hr)
            all_kept.append(torch.cat([i, f, g, o], 1))
        elif kind == "gru":
            (ir, iz, i_n), (hr, hz, hn) = own.chunk(3, 1), hidden.chunk(3, 1)
            r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
            n = (i_n + r * hn).tanh()
            new_h = n + z * (h - n)
            all_kept.append(torch.cat([r, z, n, h, hn], 1))
        else:
            total = own + hidden
            new_h = total.tanh() if kind == "rnn_tanh" else total.relu()
        if mask is not None:
            new_h = torch.where(mask[t], new_h, h)
            new_c = None if c is None or new_c is None else torch.where(mask[t], new_c, c)
        h, c = new_h, new_c
        all_h.append(h)
        all_c.extend(() if c is None else (c,))
    none = h0.new_zeros(len(steps), 0)

    def stacked(found: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(found[::-1] if reverse else found) if found else none

    return stacked(all_h), stacked(all_c), stacked(all_kept), h.clone(), h0.new_zeros(0) if c is None else c.clone()


def _backward_cpu(
    kind: str, grad_all: torch.Tensor, grad_h: torch.Tensor, grad_c: torch.Tensor, all_h: Any, all_c: Any, kept: Any, *given: Any
) -> tuple[torch.Tensor, ...]:
    """For recorded graphs that run in eager torch: the lowering, on JAX's arrays."""
    rest = (grad_all, grad_h, grad_c, all_h, all_c, kept, *given)
    with _compat.enable_x64():
        found = _backward(kind, *(transfer.to_array(x.contiguous()) if isinstance(x, torch.Tensor) else x for x in rest))
    return tuple(map(transfer.to_cpu, found))


_library.impl("recurrent_layer", _forward_meta, "Meta")
_library.impl("recurrent_layer", _step_by_step, "CPU")
_library.impl("recurrent_layer_backward", _backward_meta, "Meta")
_library.impl("recurrent_layer_backward", _backward_cpu, "CPU")


@lowering(ops.recurrent_layer.default)
def _forward(
    kind: str,
    gates: jax.Array,
    h0: jax.Array,
    c0: jax.Array | None,
    weight_hh: jax.Array,
    bias_ih: jax.Array | None,
    bias_hh: jax.Array | None,
    weight_hr: jax.Array | None,
    mask: jax.Array | None,
    reverse: bool,
) -> tuple[jax.Array, ...]:
    states, h, c = recurrent_layers.forward(kind, gates, h0, c0, Weights(weight_hh, bias_ih, bias_hh, weight_hr), mask, reverse)
    return *states, h, c


@lowering(ops.recurrent_layer_backward.default)
def _backward(
    kind: str,
    grad_all: jax.Array,
    grad_h: jax.Array,
    grad_c: jax.Array,
    all_h: jax.Array,
    all_c: jax.Array,
    kept: jax.Array,
    h0: jax.Array,
    c0: jax.Array | None,
    weight_hh: jax.Array,
    bias_ih: jax.Array | None,
    bias_hh: jax.Array | None,
    weight_hr: jax.Array | None,
    mask: jax.Array | None,
    reverse: bool,
) -> tuple[jax.Array, ...]:
    weights, states = Weights(weight_hh, bias_ih, bias_hh, weight_hr), States(all_h, all_c, kept)
    found = recurrent_layers.backward(kind, (grad_all, grad_h, grad_c), states, h0, c0, weights, mask, reverse)
    return tuple(jax.numpy.zeros((0,), h0.dtype) if x is None else x for x in found)


# -- gradients -----------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.kind, *tensors, ctx.reverse = inputs
    ctx.save_for_backward(*tensors, *output[:3])


def _differentiate(ctx: Any, grad_all: torch.Tensor, _c: Any, _kept: Any, grad_h: torch.Tensor, grad_c: torch.Tensor) -> Any:
    gates, h0, c0, *weights, mask, all_h, all_c, kept = ctx.saved_tensors
    given = (gates, h0, c0, *weights)
    if torch.is_grad_enabled():  # create_graph=True
        found = _with_graph(ctx.kind, given, mask, ctx.reverse, (grad_all, grad_h, grad_c))
    else:
        rest = (all_h, all_c, kept, h0, c0, *weights, mask, ctx.reverse)
        found = ops.recurrent_layer_backward(ctx.kind, grad_all, grad_h, grad_c, *rest)
    return None, *(None if x is None else g for x, g in zip(given, found, strict=True)), None, None


def _with_graph(
    kind: str, given: Sequence[OptTensor], mask: OptTensor, reverse: bool, grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> list[OptTensor]:
    """Gradients that have gradients themselves: those of the same layer in torch's ops."""
    wanted = [x for x in given if x is not None and x.requires_grad]
    gates, h0, c0, weight_hh, *rest = given
    assert gates is not None and h0 is not None and weight_hh is not None
    bias_ih, bias_hh, weight_hr = rest
    all_h, _, _, h, c = _step_by_step(kind, gates, h0, c0, weight_hh, bias_ih, bias_hh, weight_hr, mask, reverse)
    outs, seeds = [all_h, h], [grads[0], grads[1]]
    if c0 is not None:
        outs.append(c)
        seeds.append(grads[2])
    supply = iter(torch.autograd.grad(outs, wanted, seeds, create_graph=True, allow_unused=True))
    return [next(supply) if x is not None and x.requires_grad else None for x in given]


torch.library.register_autograd("torch_bridge::recurrent_layer", _differentiate, setup_context=_keep, lib=_library)
