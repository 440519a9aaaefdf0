"""Products of rows that are sorted by group with their groups' matrices: one product for each group, of just its rows.

Legend: m rows, k contracted (hidden), n columns (intermediate), g groups, c rows of a group's part of what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from torch_bridge.lowerings.torch_kernels.registry import kernel

aten = torch.ops.aten
Tensors = list[torch.Tensor]


class Activation(NamedTuple):
    """apply: of the gate. back: the gradient of the gate from that of the result, the gate, and the result."""

    apply: Callable[[torch.Tensor], torch.Tensor]
    back: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


ACTIVATIONS = {
    "gelu": Activation(torch.nn.functional.gelu, lambda grad, gate, _: aten.gelu_backward(grad, gate)),
    "relu": Activation(torch.relu, lambda grad, gate, _: aten.threshold_backward(grad, gate, 0)),
    "sigmoid": Activation(torch.sigmoid, lambda grad, _, result: aten.sigmoid_backward(grad, result)),
    "silu": Activation(torch.nn.functional.silu, lambda grad, gate, _: aten.silu_backward(grad, gate)),
    "tanh": Activation(torch.tanh, lambda grad, _, result: aten.tanh_backward(grad, result)),
}


def _groups(offs: torch.Tensor, m: int) -> Iterator[tuple[int, int, int]]:
    """Number, first row and end row of each group. A last one, of number -1, is what lies behind the last end."""
    start = 0
    for group, told in enumerate(offs.tolist()):
        end = min(max(told, start), m)
        yield group, start, end
        start = end
    yield -1, start, m


@kernel("grouped_rows")
def grouped_rows(arguments: Tensors, results: Tensors, transposed: bool) -> None:
    """x [m, k], w [g, k, n], or [g, n, k] if transposed, offs [g] -> [m, n]."""
    x_mk, w, offs = arguments
    (out_mn,) = results
    for group, start, end in _groups(offs, x_mk.shape[0]):
        if group < 0:
            out_mn[start:].zero_()
        elif end > start:
            torch.mm(x_mk[start:end], w[group].T if transposed else w[group], out=out_mn[start:end])


@kernel("grouped_outer")
def grouped_outer(arguments: Tensors, results: Tensors) -> None:
    """x [m, k], y [m, n], offs [g] -> [g, k, n]: of each group's rows `x.T @ y`."""
    x_mk, y_mn, offs = arguments
    (out_gkn,) = results
    for group, start, end in _groups(offs, x_mk.shape[0]):
        if group >= 0:
            torch.mm(x_mk[start:end].T, y_mn[start:end], out=out_gkn[group])


@kernel("grouped_mlp")
def grouped_mlp(arguments: Tensors, results: Tensors, act: str, c: int) -> None:
    """x [m, k], first [g, k, 2 n], second [g, n, k], offs [g], keeps [] -> [m, k], and what is kept (`grouped_mlp.py`): if `keeps`, for each group the first
    product of its first c rows, with zeros up to c; else zeros."""
    x_mk, first, second, offs, keeps = arguments
    out_mk, kept = results
    n, apply = second.shape[1], ACTIVATIONS[act].apply
    kept[offs.shape[0] * c if keeps else 0 :].zero_()
    for group, start, end in _groups(offs, x_mk.shape[0]):
        if group < 0:
            out_mk[start:].zero_()
            continue
        rows, own = end - start, kept[group * c : (group + 1) * c]
        if keeps and rows <= c:
            own[rows:].zero_()
            y = own[:rows]
            torch.mm(x_mk[start:end], first[group], out=y)
        else:
            y = x_mk[start:end] @ first[group]
            if keeps:
                own.copy_(y[:c])
        torch.mm(apply(y[:, :n]).mul_(y[:, n:]), second[group], out=out_mk[start:end])


@kernel("grouped_mlp_gradients")
def grouped_mlp_gradients(arguments: Tensors, results: Tensors, act: str, c: int) -> None:
    """grad [m, k], then what `grouped_mlp` has, kept, keeps -> the gradients of x, first and second."""
    grad_mk, x_mk, first, second, offs, kept, keeps = arguments
    grad_x, grad_first, grad_second = results
    n, activation = second.shape[1], ACTIVATIONS[act]
    for group, start, end in _groups(offs, x_mk.shape[0]):
        if group < 0:
            grad_x[start:].zero_()
            continue
        grad, x, known = grad_mk[start:end], x_mk[start:end], min(c, end - start) if keeps else 0
        y = kept[group * c : group * c + known]
        if known < end - start:
            y = torch.cat([y, x[known:] @ first[group]])
        gate, up, back, grad_y = y[:, :n], y[:, n:], grad @ second[group].T, torch.empty_like(y)
        a = activation.apply(gate)
        torch.mul(back, a, out=grad_y[:, n:])
        grad_y[:, :n] = activation.back(back.mul_(up), gate, a)
        torch.mm(a.mul_(up).T, grad, out=grad_second[group])
        torch.mm(x.T, grad_y, out=grad_first[group])
        torch.mm(grad_y, first[group].T, out=grad_x[start:end])
