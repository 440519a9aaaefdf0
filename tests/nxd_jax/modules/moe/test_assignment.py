"""Rows and tokens: each pair has its row, and the two ways are each other's gradient."""

from __future__ import annotations

import pytest
import torch

from nxd_jax.modules.moe import capacity, dropless
from nxd_jax.modules.moe.assignment import Assignment, sort_pairs

T, K, E, H = 7, 2, 5, 3


def choices(seed: int = 0, tokens: int = T) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.rand(tokens, E).topk(K, 1).indices


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_pairs_are_sorted_by_expert_and_then_by_token(device: str) -> None:
    keys = torch.tensor([[2, 0], [0, 3], [3, 2], [0, 1]])
    order, place, ends = (t.cpu() for t in sort_pairs(keys.to(device), 3))
    assert order.tolist() == [1, 2, 6, 7, 0, 5, 3, 4]  # experts 0 0 0 1 2 2, then those that belong to none
    assert place.tolist() == [[4, 0], [1, 6], [7, 5], [2, 3]]
    assert ends.tolist() == [3, 4, 6] and ends.dtype == torch.int32


def assignments() -> dict[str, Assignment]:
    padded = choices(1)
    padded[3] = E
    return {
        "dropless": dropless.assign(choices(), E)[0],
        "with pairs of nobody": dropless.assign(padded, E, complete=False)[0],
        "capacity 2": capacity.assign(choices(), E, 2),
        "capacity 7": capacity.assign(padded, E, 7),
    }


@pytest.mark.parametrize("name", assignments())
def test_gradients_of_both_ways(name: str) -> None:
    """Against numbers, first and second derivatives."""
    assigned = assignments()[name]
    torch.manual_seed(2)
    x = torch.randn(T, H, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(assigned.pair.shape[0], H, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(T, K, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(assigned.to_rows, x)
    assert torch.autograd.gradgradcheck(assigned.to_rows, x)
    assert torch.autograd.gradcheck(assigned.to_tokens, (rows, weights))
    assert torch.autograd.gradgradcheck(assigned.to_tokens, (rows, weights))
    assert torch.autograd.gradcheck(lambda r: assigned.to_tokens(r), rows)
    assert torch.autograd.gradcheck(assigned.of_rows, weights)


@pytest.mark.parametrize("name", assignments())
def test_rows_are_those_of_their_tokens(name: str) -> None:
    assigned = assignments()[name]
    x, weights = torch.randn(T, H), torch.randn(T, K)
    rows, factors = assigned.to_rows(x), assigned.of_rows(weights)
    kept = torch.ones(T, K, dtype=torch.bool) if assigned.kept is None else assigned.kept
    for t in range(T):
        for j in range(K):
            if kept[t, j]:
                assert torch.equal(rows[assigned.row[t, j]], x[t]) and factors[assigned.row[t, j]] == weights[t, j]
    if assigned.used is not None:
        assert not rows[~assigned.used].any() and not factors[~assigned.used].any()
        assert assigned.used.sum() == kept.sum()
    expected = torch.stack([sum((weights[t, j] * x[t] for j in range(K) if kept[t, j]), torch.zeros(H)) for t in range(T)])
    torch.testing.assert_close(assigned.to_tokens(rows, weights), expected)
    torch.testing.assert_close(assigned.to_tokens(rows * factors.unsqueeze(1)), expected)


def test_what_nobody_reads_may_be_anything() -> None:
    """NaN in a row without a pair, or in the row that a dropped pair would read, stays there."""
    assigned = capacity.assign(torch.tensor([[1], [1], [1]]), 2, 2)
    rows = torch.tensor([[torch.nan], [torch.nan], [1.0], [2.0]], requires_grad=True)
    weights = torch.ones(3, 1, requires_grad=True)
    out = assigned.to_tokens(rows, weights)
    assert out.reshape(-1).tolist() == [1.0, 2.0, 0.0]
    out.sum().backward()
    assert rows.grad is not None and rows.grad.reshape(-1).tolist() == [0.0, 0.0, 1.0, 1.0]
    assert weights.grad is not None and weights.grad.reshape(-1).tolist() == [1.0, 2.0, 0.0]


def test_sums_over_experts_are_made_in_float32() -> None:
    assigned = dropless.assign(torch.arange(256).reshape(1, 256), 256)[0]
    rows = torch.full((256, 1), 1.01, dtype=torch.bfloat16)
    weights = torch.full((1, 256), 1.0, dtype=torch.bfloat16)
    expected = (rows.double() * 256)[0].to(torch.bfloat16)
    assert torch.equal(assigned.to_tokens(rows, weights)[0], expected)
