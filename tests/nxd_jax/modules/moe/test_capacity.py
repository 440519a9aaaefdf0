"""The arithmetic of experts with a capacity: how many slots, who gets them, and what weights are left."""

from __future__ import annotations

import math

import pytest
import torch

from nxd_jax.modules.moe import capacity
from tests.nxd_jax.modules.moe.by_hand import taken


def test_the_example() -> None:
    """Six tokens, three experts, one choice each, factor 1: two slots an expert, and the third token for expert 0 is dropped."""
    index = torch.tensor([[0], [0], [0], [1], [2], [2]])
    assert capacity.expert_capacity(6, 1, 1.0, 3) == 2
    assert capacity.positions(index, 3).reshape(-1).tolist() == [1, 2, 3, 1, 1, 2]
    assigned = capacity.assign(index, 3, 2)
    assert assigned.kept is not None and assigned.used is not None
    assert assigned.kept.reshape(-1).tolist() == [True, True, False, True, True, True]
    assert capacity.slots(assigned, 2).tolist() == [[0, 1], [3, 0], [4, 5]]
    assert assigned.used.tolist() == [True, True, True, False, True, True]
    assert [r for r, kept in zip(assigned.row.reshape(-1).tolist(), assigned.kept.reshape(-1).tolist(), strict=True) if kept] == [
        0,
        1,
        2,
        4,
        5,
    ]
    weights = capacity.pair_weights(torch.full((6, 3), 0.5), index, assigned.kept)
    assert weights.reshape(-1).tolist() == [0.5, 0.5, 0.0, 0.5, 0.5, 0.5]


def test_slots_of_an_expert() -> None:
    for tokens, k, experts in [(6, 1, 3), (7, 2, 4), (512, 2, 8), (1, 2, 4), (13, 4, 4)]:
        for factor in (0.1, 0.5, 1.0, 1.25, experts / k):
            assert capacity.expert_capacity(tokens, k, factor, experts) == min(tokens, math.ceil(tokens * k * factor / experts))
        assert capacity.expert_capacity(tokens, k, experts / k - 1e-6, experts) == tokens


@pytest.mark.parametrize("factor", [0, -1.0])
def test_a_capacity_must_be_positive(factor: float) -> None:
    with pytest.raises(ValueError, match=r"capacity_factor must be positive .* got (0|-1\.0); without dropping, no capacity is needed"):
        capacity.expert_capacity(4, 1, factor, 2)


@pytest.mark.core(keep=2)
@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_earlier_tokens_win(k: int, device: str) -> None:
    """Positions are NxD's: a cumulative sum of the mask of choices, in float64; slots hold the tokens in order."""
    tokens, experts = 37, 4
    torch.manual_seed(k)
    index = torch.rand(tokens, experts).topk(k, 1).indices
    mask = torch.zeros(tokens, experts, dtype=torch.float64).scatter(1, index, 1.0)
    position = mask.cumsum(0).gather(1, index)
    assert torch.equal(capacity.positions(index.to(device), experts).cpu(), position.long())
    for slots in (1, 5, 9, tokens):
        assigned = capacity.assign(index.to(device), experts, slots)
        assert assigned.kept is not None and assigned.used is not None
        kept, used, table = assigned.kept.cpu(), assigned.used.cpu().reshape(experts, slots), capacity.slots(assigned, slots).cpu()
        assert torch.equal(kept, position <= slots) and torch.equal(kept, taken(index, experts, slots))
        for e in range(experts):
            held = [t for t in range(tokens) if mask[t, e]][:slots]
            assert table[e].tolist() == held + [0] * (slots - len(held))
            assert used[e].tolist() == [True] * len(held) + [False] * (slots - len(held))


def test_padding_takes_no_slot() -> None:
    index = torch.tensor([[0], [0], [0], [1]])
    assigned = capacity.assign(torch.tensor([[2], [0], [0], [1]]), 2, 2)  # the first token is padding
    assert assigned.kept is not None and assigned.kept.reshape(-1).tolist() == [False, True, True, True]
    assert capacity.slots(assigned, 2).tolist() == [[1, 2], [3, 0]]
    assert torch.equal(assigned.kept, taken(index, 2, 2, torch.tensor([0, 1, 1, 1])))


def test_weights_are_normalised_after_dropping() -> None:
    """A token that lost one of its experts gives the other the weight 1; one that lost both gives 0. So do their gradients."""
    affinities = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2]], requires_grad=True)
    index = torch.tensor([[0, 1], [0, 1], [0, 1]])
    kept = torch.tensor([[True, True], [True, False], [False, False]])
    weights = capacity.pair_weights(affinities, index, kept, normalize=True)
    torch.testing.assert_close(weights, torch.tensor([[0.625, 0.375], [1.0, 0.0], [0.0, 0.0]]))
    (weights * torch.tensor([1.0, -1.0])).sum().backward()
    torch.testing.assert_close(affinities.grad, torch.tensor([[0.9375, -1.5625, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(capacity.pair_weights(affinities, index, kept), torch.tensor([[0.5, 0.3], [0.5, 0.0], [0.0, 0.0]]))
    torch.testing.assert_close(capacity.pair_weights(affinities, index), torch.tensor([[0.5, 0.3]] * 3))
