"""`nn.LSTM`, `nn.GRU` and `nn.RNN` on xla: each layer and direction is one op over all time steps, a loop in the program.

torch would record every step of time with ops of its own, which XLA compiles one by one: 64 steps of two layers took a minute. What one op cannot say goes that
way still: autocast (which chooses the dtype of each product), formats that every result is rounded to (`precision.device_formats`), transforms of `torch.func`,
and arguments that do not fit, for which torch has the error.
Gradients of gradients go through the same ops of torch, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torch_bridge.lowerings.recurrent_layers import GATES
from torch_bridge.precision import precision_mode
from torch_bridge.recorder import packed_sequences
from torch_bridge.recorder.dispatch import composite
from torch_bridge.recorder.recurrent_ops import OptTensor, ops
from torch_bridge.recorder.tensor import XLATensor

aten = torch.ops.aten

LEAST_STEPS = 4
"""Shorter sequences are recorded step by step."""


class Call(NamedTuple):
    """A call of `aten.lstm.input` and the like. lengths: how many sequences each step has, of packed data, else None."""

    kind: str
    x: torch.Tensor
    lengths: OptTensor
    h0: torch.Tensor
    c0: OptTensor
    params: list[torch.Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def projected(self) -> bool:
        """Whether an LSTM projects its h, as torch finds out."""
        return self.c0 is not None and self.h0.shape[2] != self.c0.shape[2]

    @property
    def each(self) -> int:
        """Weights of a layer in one direction."""
        return 2 + 2 * self.has_biases + self.projected

    def weights(self) -> list[tuple[torch.Tensor, Any]]:
        """By layer and direction: the weight of the input, and what the op takes."""
        rows = [self.params[k : k + self.each] for k in range(0, len(self.params), self.each)]
        return [(row[0], (row[1], *(row[2:4] if self.has_biases else (None, None)), row[-1] if self.projected else None)) for row in rows]

    def fits(self) -> bool:
        """Whether it is what the op can say."""
        tensors = [self.x, self.h0, *([] if self.c0 is None else [self.c0]), *self.params]
        if not all(type(t) is XLATensor or (type(t) is torch.nn.Parameter and isinstance(t, XLATensor)) for t in tensors):
            return False
        if len({t.dtype for t in tensors}) > 1 or not self.x.is_floating_point():
            return False
        if (
            torch.is_autocast_enabled("xla")
            or torch._C._are_functorch_transforms_active()
            or precision_mode.store(precision_mode.current())
        ):
            return False
        layers, steps = self.num_layers * self.directions, self.x.shape[0 if not self.batch_first else 1]
        if self.x.dim() != (2 if self.lengths is not None else 3) or self.h0.dim() != 3 or len(self.params) != layers * self.each:
            return False
        if (steps if self.lengths is None else self.lengths.numel()) < LEAST_STEPS or not all(t.numel() for t in tensors):
            return False
        return self._shapes_fit(layers)

    def _shapes_fit(self, layers: int) -> bool:
        batch = int(self.lengths[0]) if self.lengths is not None else self.x.shape[1 if not self.batch_first else 0]
        inner = self.h0.shape[2] if self.c0 is None else self.c0.shape[2]
        gates, outer = GATES[self.kind] * inner, self.h0.shape[2]
        if self.h0.shape[:2] != (layers, batch) or (self.c0 is not None and self.c0.shape != (layers, batch, inner)):
            return False
        width = self.x.shape[-1]
        for k, (weight_ih, (weight_hh, *biases, weight_hr)) in enumerate(self.weights()):
            given = width if k < self.directions else outer * self.directions
            if weight_ih.shape != (gates, given) or weight_hh.shape != (gates, outer):
                return False
            if any(b is not None and b.shape != (gates,) for b in biases) or (weight_hr is not None and weight_hr.shape != (outer, inner)):
                return False
        return True


def run(call: Call) -> tuple[torch.Tensor, ...]:
    """The results of a call that fits: what leaves the last layer, the last h, and of an LSTM the last c."""
    x, mask = call.x, None
    if call.lengths is not None:
        x, _ = packed_sequences.pad(x, call.lengths, False, 0.0, -1)
        active = torch.arange(x.shape[1], device="cpu") < call.lengths.unsqueeze(1)
        if not active.all():
            mask = active.unsqueeze(2).to(x.device)
    elif call.batch_first:
        x = x.transpose(0, 1)
    last_h: list[torch.Tensor] = []
    last_c: list[torch.Tensor] = []
    rows = call.weights()
    for layer in range(call.num_layers):
        outs = []
        for k in range(layer * call.directions, (layer + 1) * call.directions):
            weight_ih, weights = rows[k]
            gates = torch.nn.functional.linear(x, weight_ih)
            c0 = None if call.c0 is None else call.c0[k]
            out, _, _, h, c = ops.recurrent_layer(call.kind, gates, call.h0[k], c0, *weights, mask, k % call.directions == 1)
            outs.append(out)
            last_h.append(h)
            last_c.append(c)
        x = outs[0] if len(outs) == 1 else torch.cat(outs, -1)
        if call.dropout and call.train and layer < call.num_layers - 1:
            x = torch.dropout(x, call.dropout, True)
    if call.lengths is not None:
        x = x.flatten(0, 1).index_select(0, active.flatten().nonzero().flatten().to(x.device))
    elif call.batch_first:
        x = x.transpose(0, 1)
    return (x, torch.stack(last_h), *([] if call.c0 is None else [torch.stack(last_c)]))


def _call(kind: str, packed: bool, args: Sequence[Any]) -> Call | None:
    """A call as torch makes it; None if it has not the states that it needs."""
    x, *rest = args
    lengths = rest.pop(0) if packed else None
    hidden, params, has_biases, num_layers, dropout, train, bidirectional = rest[:7]
    if kind == "lstm" and len(hidden) != 2:
        return None
    h0, c0 = hidden if kind == "lstm" else (hidden, None)
    batch_first = False if packed else rest[7]
    return Call(kind, x, lengths, h0, c0, list(params), has_biases, num_layers, dropout, train, bidirectional, batch_first)


def _front(kind: str, packed: bool) -> Callable[..., Any]:
    op = getattr(getattr(aten, kind), "data" if packed else "input")

    def front(*args: Any) -> Any:
        if packed:
            packed_sequences.same_on_all_ranks("batch sizes", args[1])
        call = _call(kind, packed, args)
        if call is not None and call.fits():
            return run(call)
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)

    return front


for _kind in GATES:
    for _packed in (False, True):
        composite(getattr(getattr(aten, _kind), "data" if _packed else "input"), _front(_kind, _packed))
