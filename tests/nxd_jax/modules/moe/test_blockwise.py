"""Maps of tokens in blocks, and shares of experts that several ranks hold."""

from __future__ import annotations

import math

import pytest
import torch

from nxd_jax.modules.moe import blockwise
from nxd_jax.modules.moe.expert_mlps import ExpertMLPs


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_six_tokens_in_blocks_of_two(device: str) -> None:
    mask = blockwise.get_expert_mask(torch.tensor([[0], [1], [0], [2], [0], [1]], device=device), 3)
    assert mask.dtype == torch.float64 and mask.cpu().sum(0).tolist() == [3, 2, 1]
    experts, tokens = blockwise.get_blockwise_expert_and_token_mapping(6, 5, mask, block_size=2)
    assert experts.cpu().tolist() == [0, 0, 1, 2, 2]
    assert tokens.cpu().tolist() == [0, 2, 4, -1, 1, 5, 3, -1, -1, -1]
    assert blockwise.get_block_conditions(2, 5, tokens).cpu().tolist() == [1, 1, 1, 1, 0]


@pytest.mark.parametrize(("tokens", "k", "experts", "size"), [(50, 1, 4, 8), (33, 2, 8, 16), (3, 2, 8, 512), (64, 4, 4, 1), (7, 3, 5, 4)])
def test_every_token_has_its_places(tokens: int, k: int, experts: int, size: int) -> None:
    """Whatever the routing, the number of blocks that is known beforehand is enough."""
    count = blockwise.block_count(tokens, k, experts, size)
    assert count == min(math.ceil((tokens * k - (experts - 1)) / size) + experts - 1, tokens * k)
    for routing in ("random", "one", "spread"):
        torch.manual_seed(tokens)
        scores = torch.rand(tokens, experts)
        if routing != "random":
            scores = scores * 1e-3 + torch.linspace(1, 0, experts)
        if routing == "spread":
            scores[: experts - 1] = torch.eye(experts)[1:][: scores[: experts - 1].shape[0]]
        mask = blockwise.get_expert_mask(scores.topk(k, 1).indices, experts)
        to_expert, to_id = blockwise.get_blockwise_expert_and_token_mapping(tokens, count, mask, block_size=size)
        blocks = to_id.reshape(count, size)
        for e in range(experts):
            held = blocks[to_expert == e].reshape(-1)
            assert held[held >= 0].tolist() == mask[:, e].nonzero().reshape(-1).tolist()
            assert ((held >= 0).int().diff() <= 0).all()  # padding only at the end of its last block
        assert to_expert.tolist() == sorted(to_expert.tolist())


def test_nxds_arguments() -> None:
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    experts, tokens = ExpertMLPs.get_blockwise_expert_and_token_mapping(
        total_tokens=3,
        num_blocks=4,
        expert_mask=mask,
        expert_index=None,
        block_size=2,
        device=torch.device("cpu"),
        enable_spmd_rank=False,
        spmd_rank=None,
        tensor_parallel_group=None,
        optimized_block_to_token_mapping=False,
        parallelize_token_to_block_mapping=True,
        pad_num_blocks_to_even=True,
    )
    assert experts.tolist() == [0, 1, 1, 1] and tokens.tolist() == [0, 1, 1, 2, -1, -1, -1, -1]
    with pytest.raises(ValueError, match=r"expert_mask must be \[total_tokens=5, experts\], got \[3, 2\]"):
        ExpertMLPs.get_blockwise_expert_and_token_mapping(5, 4, mask, block_size=2)


def test_masked_affinities() -> None:
    affinities = torch.tensor([[0.2, 0.3, 0.5]])
    mask = torch.tensor([[1.0, 0.0, 1.0]])
    torch.testing.assert_close(blockwise.get_expert_affinities_masked(affinities, mask, False), torch.tensor([[0.2, 0.0, 0.5]]))
    torch.testing.assert_close(blockwise.get_expert_affinities_masked(affinities, mask, True), torch.tensor([[2 / 7, 0.0, 5 / 7]]))


SHARES = [
    ([[0, 0, 1, 1], [1, 1, 0, 0]], 64, [[0, 0, 0, 0], [0, 0, 64, 64]], [[-1, -1, 63, 63], [63, 63, 63, 63]]),
    ([[0, 0, 1, 1], [1, 1, 0, 0]], 63, [[0, 0, 0, 0], [0, 0, 63, 63]], [[-1, -1, 62, 62], [62, 62, 62, 62]]),
    ([[1, 1, 1, 0], [1, 0, 0, 2]], 64, [[0, 0, 0, 0], [32, 64, 64, 0]], [[31, 63, 63, -1], [63, 63, 63, 63]]),
    ([[1, 1, 1, 0], [1, 0, 0, 2]], 63, [[0, 0, 0, 0], [31, 63, 63, 0]], [[30, 62, 62, -1], [62, 62, 62, 62]]),
]


@pytest.mark.parametrize(("degree", "tokens", "starts", "ends"), SHARES)
def test_shares_of_experts_that_several_ranks_hold(degree: list, tokens: int, starts: list, ends: list) -> None:
    found = blockwise.allocate_token_blocks(torch.tensor(degree, dtype=torch.int32), tokens)
    assert [t.tolist() for t in found] == [starts, ends]
    assert {t.dtype for t in found} == {torch.int32}


@pytest.mark.parametrize("shape", ["a number", "a tensor"])
@pytest.mark.parametrize(
    ("distribution", "tokens"), [([[0, 1], [2, 3]], 5), ([[3, 0, 3], [1, 2, 0]], 9), ([[0, 0, 1], [1, 0, 0], [1, 2, 3]], 10)]
)
def test_each_token_of_an_expert_is_computed_once(distribution: list, tokens: int, shape: str) -> None:
    experts = 4
    degree = torch.tensor([[own.count(e) for e in range(experts)] for own in distribution])
    starts, ends = blockwise.allocate_token_blocks(degree, tokens)
    seen = torch.zeros(tokens, experts)
    for rank, own in enumerate(distribution):
        mask = blockwise.generate_local_expert_mask_with_redundancy(
            torch.ones(tokens, len(own)), torch.tensor([own]), starts, ends, experts, rank if shape == "a number" else torch.tensor([rank])
        )
        assert mask.shape == (tokens, len(own))
        seen.index_add_(1, torch.tensor(own), mask)
        again = [k for k, e in enumerate(own) if e in own[:k]]
        assert not mask[:, again].any()
    held = degree.sum(0) > 0
    assert (seen[:, held] == 1).all() and not seen[:, ~held].any()
