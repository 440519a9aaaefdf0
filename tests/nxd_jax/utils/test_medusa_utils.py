"""Medusa's buffers from first principles, and whole generations whose tokens are those of greedy decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nxd_jax.utils.medusa_utils import (
    TOPK,
    evaluate_posterior,
    generate_candidates,
    generate_medusa_buffers,
    pad_path,
    update_inference_inputs,
)
from tests.nxd_jax.utils.toy_medusa import best_after, greedy, grown, heads_after

SMALL = [[0], [0, 0], [1], [0, 1], [0, 0, 0], [2], [1, 0]]
TREES = {
    "one": [[3]],
    "chain": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]],
    "small": SMALL,
    "wide": [[i] for i in range(TOPK)] + [[i, j] for i in range(3) for j in range(TOPK)],
    **{f"grown {seed}": grown(seed) for seed in range(4)},
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_buffers(tree: list[list[int]]) -> None:
    """By their meaning: who is on whose path, which token of which head, how far down; every leaf has its branch, longest first."""
    found = generate_medusa_buffers(tree)
    nodes = [[], *sorted(sorted(tree), key=len)]
    for i, path in enumerate(nodes):
        assert found["medusa_attn_mask"][i].tolist() == [float(path[: len(other)] == other) for other in nodes]
        assert found["medusa_position_ids"][i] == len(path)
        assert found["tree_indices"][i] == (1 + TOPK * (len(path) - 1) + path[-1] if path else 0)
    assert found["medusa_attn_mask"].dtype == torch.float32
    leaves = [path for path in nodes if not any(other[:-1] == path for other in nodes if other)]
    branches = [[k for k in row if k >= 0] for row in found["retrieve_indices"].tolist()]
    assert sorted(nodes[branch[-1]] for branch in branches) == sorted(leaves)
    for branch in branches:
        assert [nodes[k] for k in branch] == [nodes[branch[-1]][:length] for length in range(len(branch))]
    lengths = [len(branch) for branch in branches]
    assert lengths == sorted(lengths, reverse=True) and found["retrieve_indices"].shape[1] == lengths[0]


def test_buffers_as_numbers() -> None:
    """What upstream's function gives for this tree."""
    found = generate_medusa_buffers([[0], [0, 0], [1], [0, 1]])
    assert found["medusa_attn_mask"].int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 0, 1]]
    assert found["tree_indices"].tolist() == [0, 1, 2, 11, 12]
    assert found["medusa_position_ids"].tolist() == [0, 1, 1, 2, 2]
    assert found["retrieve_indices"].tolist() == [[0, 1, 4], [0, 1, 3], [0, 2, -1]]
    assert pad_path([1, 2, 3], 5) == [1, 2, 3, -2, -2] and pad_path([1, 2], 1, 0) == [1, 2]


def generated(tree: list[list[int]], prompt: list[int], least: int, hit: float) -> tuple[list[int], int]:
    """Tokens by Medusa, at least so many new ones, and how many forward passes of the tree they took. The mask says what each node sees."""
    buffers = generate_medusa_buffers(tree)
    heads = max(len(path) for path in tree)
    seen = [[k for k, one in enumerate(row) if one] for row in buffers["medusa_attn_mask"].tolist()]
    input_ids = torch.tensor([prompt])
    logits = torch.tensor([[best_after(prompt)]])
    medusa_logits = torch.tensor(heads_after(prompt, heads, hit))[:, None, None, :]
    made: Any = 0
    passes = 0
    while made < least:
        candidates, nodes = generate_candidates(medusa_logits, logits, buffers["tree_indices"], buffers["retrieve_indices"])
        before, tokens = input_ids[0].tolist(), nodes[0].tolist()
        texts = [before + [tokens[k] for k in whom] for whom in seen]
        of_nodes = torch.tensor([best_after(text) for text in texts])
        of_heads = torch.tensor([heads_after(text, heads, hit) for text in texts]).transpose(0, 1)
        branch_logits, branch_heads = of_nodes[buffers["retrieve_indices"]], of_heads[:, buffers["retrieve_indices"]]
        best, accepted = evaluate_posterior(branch_logits, candidates)
        length = input_ids.shape[1]
        input_ids, logits, medusa_logits, made, kept = update_inference_inputs(
            input_ids, candidates, best, accepted, buffers["retrieve_indices"], None, branch_logits, branch_heads, made
        )
        assert [tokens[k - length] for k in kept.tolist()] == input_ids[0, length:].tolist()
        assert logits.shape == (1, 1, TOPK) and medusa_logits.shape == (heads, 1, 1, TOPK)
        passes += 1
    return input_ids[0].tolist(), passes


@pytest.mark.thorough(keep=12)
@pytest.mark.core(keep=4)
@pytest.mark.parametrize("hit", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_the_tokens_are_those_of_greedy_decoding(tree: list[list[int]], hit: float) -> None:
    for start in range(5):
        found, _ = generated(tree, [start, 7], 25, hit)
        assert found == greedy([start, 7], len(found) - 2)


def test_right_guesses_save_forward_passes() -> None:
    chain = [[i] for i in range(3)] + [[i, j] for i in range(3) for j in range(3)]
    assert generated(chain, [1], 30, hit=1.0)[1] == 10
    assert generated([[5]], [1], 30, hit=0.0)[1] > 20


def test_on_the_device() -> None:
    """Nothing is read before the number accepted is."""
    buffers = generate_medusa_buffers(SMALL)
    heads, own = torch.tensor(heads_after([3], 3, 1.0))[:, None, None], torch.tensor([[best_after([3])]])
    said = torch.tensor([best_after([k]) for k in range(8)])[buffers["retrieve_indices"]]

    def step(device: str) -> list[torch.Tensor]:
        places = [buffers[name].to(device) for name in ("tree_indices", "retrieve_indices")]
        candidates, nodes = generate_candidates(heads.to(device), own.to(device), *places)
        return [candidates, nodes, *evaluate_posterior(said.to(device), candidates)]

    for found, expected in zip(step("xla"), step("cpu"), strict=True):
        assert torch.equal(found.cpu(), expected)


def test_the_end_of_short_branches_matches_no_token() -> None:
    """The model says 0 after the leaf of a short branch. Upstream has a 0 there, takes it for a right guess, and goes on with another node's logits."""
    candidates, _ = generate_candidates(
        torch.arange(1, 2 * TOPK + 1).reshape(2, 1, 1, TOPK),
        torch.tensor([[[9]]]),
        *(generate_medusa_buffers([[0], [1], [0, 0]])[name] for name in ("tree_indices", "retrieve_indices")),
    )
    assert candidates.tolist() == [[9, 1, 11], [9, 2, -1]]
    logits = torch.tensor([[[2], [0], [0]], [[2], [0], [0]]])  # after the root 2, after everything else 0
    best, accepted = evaluate_posterior(logits, candidates)
    assert (int(best), int(accepted)) == (1, 1)


def test_accepting() -> None:
    def lengths(candidates: list[list[int]], said: list[list[int]]) -> tuple[int, int]:
        best, accepted = evaluate_posterior(torch.tensor(said)[..., None], torch.tensor(candidates))
        return int(best), int(accepted)

    assert lengths([[5, 1, 2], [5, 3, 4]], [[1, 9, 9], [1, 4, 9]]) == (0, 1)
    assert lengths([[5, 1, 2], [5, 3, 4]], [[3, 2, 9], [3, 4, 9]]) == (1, 2)
    assert lengths([[5, 1, 2], [5, 3, 4]], [[0, 2, 9], [0, 4, 9]]) == (0, 0)  # what follows a wrong guess does not count
    assert lengths([[5, 1, 2], [5, 1, 4]], [[1, 0, 9], [1, 0, 9]]) == (0, 1)  # the first of equals


Call = Callable[[], Any]


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ([], "must name at least one node"),
        ([[], [0]], "must name at least one node, each by one choice or more"),
        ([[0], [1], [0]], r"has a node twice: \[0\]"),
        ([[0], [1, 0]], r"has \[1, 0\] without \[1\], on whose way it is: add that node"),
        ([[0, 0, 1], [0]], r"has \[0, 0, 1\] without \[0, 0\]"),
        ([[0], [10]], r"has \[10\]: a head has 10 guesses, so that choices are 0 to 9"),
        ([[-1]], r"has \[-1\]: a head has 10 guesses"),
    ],
)
def test_trees_that_cannot_be(tree: list[list[int]], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        generate_medusa_buffers(tree)


@pytest.mark.parametrize(("heads", "own"), [((2, 1, 1, 5), (1, 1, 5)), ((2, 1, 3, TOPK), (1, 1, TOPK)), ((2, 1, 1, TOPK), (2, 1, TOPK))])
def test_tokens_of_another_shape(heads: tuple[int, ...], own: tuple[int, ...]) -> None:
    buffers = generate_medusa_buffers(SMALL)
    with pytest.raises(
        ValueError, match=r"wanted are the best tokens of one position of one sequence, \[heads, 1, 1, 10\] and \[1, 1, 10\]"
    ):
        generate_candidates(torch.zeros(heads).long(), torch.zeros(own).long(), buffers["tree_indices"], buffers["retrieve_indices"])
