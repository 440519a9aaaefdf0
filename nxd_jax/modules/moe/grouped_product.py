"""Rows that are sorted by expert, each times the matrix of its expert: the products of dropless layers, at the cost of the rows that belong to experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

_ROW_BYTES = 16
"""torch wants rows of both operands of a grouped product to be multiples of so many bytes."""


def grouped_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Row r of x times the matrix of its expert, plus the expert's bias -> [m, n], in x's dtype.

    x: [m, k], rows of expert 0 first, then those of expert 1, ... weight: [e, k, n] and bias: [e, n], in x's dtype. ends: [e] integers, where each expert's
    rows end (an expert without rows ends where the one before it does). Rows behind the last end belong to nobody: they give zeros, and get a gradient of zero.

    Raises ValueError for shapes that do not fit together.
    """
    check_product(x, weight, ends, bias)
    if x.device.type == "cpu":
        return _one_by_one(x, weight, ends, bias)
    ends = ends.to(torch.int32)
    out = _product(x, weight, ends)
    if bias is None:
        return out
    unit = _unit(x)
    ones = x.new_ones((x.shape[0], unit))  # a gather would add up the bias's gradient row by row
    return out + _product(ones, F.pad(bias.unsqueeze(1), (0, 0, 0, unit - 1)), ends)


def _product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    k, n = weight.shape[1:]
    more_k, more_n = -k % _unit(x), -n % _unit(x)
    if more_k or more_n:
        x, weight = F.pad(x, (0, more_k)), F.pad(weight, (0, more_n, 0, more_k))
    out: torch.Tensor = _Grouped.apply(x.contiguous(), weight.contiguous(), ends)
    return out.narrow(1, 0, n) if more_n else out


def _unit(x: torch.Tensor) -> int:
    """Numbers in so many bytes: 4 float32, or 8 bfloat16."""
    return _ROW_BYTES // x.element_size()


class _Grouped(torch.autograd.Function):
    """`torch._grouped_mm` of rows. The rows' gradient reads the weight as it lies: torch's own takes its transpose, which would be written out."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, ends)
        return torch._grouped_mm(x, weight, offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = torch._grouped_mm(weight, grad.t(), offs=ends).t() if ctx.needs_input_grad[0] else None
        grad_weight = torch._grouped_mm(x.t(), grad, offs=ends) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def _one_by_one(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """On the CPU, where torch leaves the rows behind the last end as they happen to be, and takes no float64."""
    stops = [int(e) for e in ends.tolist()]
    parts = []
    for expert, (start, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True)):
        part = x[start:stop] @ weight[expert]
        parts.append(part if bias is None else part + bias[expert])
    return torch.cat([*parts, x.new_zeros((x.shape[0] - stops[-1], weight.shape[2]))])


def check_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise ValueError, with all shapes, if they do not fit together."""
    fits = x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[1] and list(ends.shape) == [weight.shape[0]]
    if not fits or (bias is not None and list(bias.shape) != [weight.shape[0], weight.shape[2]]):
        given = {"rows": x, "weight": weight, "ends": ends, **({} if bias is None else {"bias": bias})}
        raise ValueError(
            f"a grouped product takes rows [m, k], a weight [e, k, n], ends [e] and a bias [e, n], got "
            f"{', '.join(f'{name} {list(t.shape)}' for name, t in given.items())}"
        )
