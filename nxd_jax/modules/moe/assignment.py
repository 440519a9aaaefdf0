"""Which row of the experts' input each token goes to, the way there, and the way back with a weighted sum.

Tokens choose k experts each: m = T k pairs, pair t k + j being token t with its j-th expert. Rows are pairs in the order in which experts read them. Since both
directions are known, tokens and gradients are read (gathered) both ways, and nothing is scattered; the two ways are each other's gradient.

Legend: T tokens, k experts of a token, H hidden, R rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Assignment(NamedTuple):
    """Pairs and rows of each other.

    row: [T, k] int64, the row of each pair (any row for a pair that has none). pair: [R] int64, the pair of each row (0 for a row that has none).
    kept: [T, k] bool, the pairs that have a row. used: [R] bool, the rows that have a pair. None, for both: all.
    """

    # a tuple: modules that are played would keep other objects, and with them its tensors, beyond the step

    row: torch.Tensor
    pair: torch.Tensor
    kept: torch.Tensor | None = None
    used: torch.Tensor | None = None

    def to_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [T, H] as rows [R, H]. Rows that nobody uses are zero (NxD's hold token 0: with weight 0, so it counts nothing there either)."""
        found: torch.Tensor = _ToRows.apply(x, *self._tensors())
        return found

    def to_tokens(self, rows: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """For each token the sum of its rows, [R, H] -> [T, H], weighted with `weights` [T, k] if given. Pairs without a row add nothing."""
        found: torch.Tensor = _Sum.apply(rows, *self._tensors()) if weights is None else _Mix.apply(rows, weights, *self._tensors())
        return found

    def of_rows(self, values: torch.Tensor) -> torch.Tensor:
        """A number of each pair, [T, k], as one of each row, [R]."""
        found = values.reshape(-1).index_select(0, self.pair)
        return found if self.used is None else found.masked_fill(~self.used, 0)

    def _tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.row, self.pair, self.kept, self.used


def sort_pairs(keys: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs in the order of their experts, those of one expert in the order of their tokens.

    keys: [T, k] integers, the expert of each pair: 0..count-1; `count` for pairs that belong to none, which come last.
    Returns the pairs in that order [m] int64, each pair's place in it [T, k] int64, and the experts' cumulative ends [count] int32.
    """
    flat = keys.reshape(-1).to(torch.int32)
    order = torch.argsort(flat, stable=True)
    place = torch.zeros_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
    experts = torch.arange(count, dtype=torch.int32, device=order.device)
    ends = torch.searchsorted(flat[order], experts, right=True, out_int32=True)
    return order, place.reshape(keys.shape), ends


def _gather_tokens(x: torch.Tensor, row: torch.Tensor, pair: torch.Tensor, used: torch.Tensor | None) -> torch.Tensor:
    found = x.index_select(0, pair // row.shape[1])
    return found if used is None else found.masked_fill(~used.unsqueeze(1), 0)


def _gather_rows(rows: torch.Tensor, row: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """The rows of each pair, [T, k, H]."""
    found = rows.index_select(0, row.reshape(-1)).reshape(*row.shape, rows.shape[1])
    return found if kept is None else found.masked_fill(~kept.unsqueeze(2), 0)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, row: Any, pair: Any, kept: Any, used: Any) -> torch.Tensor:
        ctx.save_for_backward(row, pair, kept, used)
        return _gather_tokens(x, row, pair, used)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Sum.apply(grad, *ctx.saved_tensors), None, None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, row: Any, pair: Any, kept: Any, used: Any) -> torch.Tensor:
        ctx.save_for_backward(row, pair, kept, used)
        return _gather_rows(rows, row, kept).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _ToRows.apply(grad, *ctx.saved_tensors), None, None, None, None


class _Mix(torch.autograd.Function):
    """The weighted sum. The gradient's rows are gathered once, for the rows' gradient and for the weights'."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, row: Any, pair: Any, kept: Any, used: Any) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, row, pair, kept, used)
        return (_wide(_gather_rows(rows, row, kept)) * _wide(weights).unsqueeze(2)).sum(1).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows, weights, row, pair, kept, used = ctx.saved_tensors
        spread = _wide(_ToRows.apply(grad, row, pair, kept, used))
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            factors = _wide(weights).reshape(-1).index_select(0, pair)
            grad_rows = (spread * factors.unsqueeze(1)).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            dots = (spread * _wide(rows)).sum(1)
            grad_weights = dots.index_select(0, row.reshape(-1)).reshape(row.shape)
            grad_weights = (grad_weights if kept is None else grad_weights.masked_fill(~kept, 0)).to(weights.dtype)
        return grad_rows, grad_weights, None, None, None, None


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Sums over k are made in float32 at least."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
