"""`neuronx_distributed.utils.medusa_utils`: Medusa's speculative decoding, greedy, for one sequence.

Extra heads guess the tokens after the next one. A tree of guesses goes through the model in one forward pass, and the longest branch that agrees
with what the model itself says is kept, with one more token of the model's. A node of the tree is a path, the list of choices that leads to it:
[0, 2] is the third best guess of head 1 after the best guess of head 0; the root is the model's own token. Nodes are sorted: the root, then by
length, then by value.

Where "logits" are spoken of, as in the original, it is the `TOPK` best tokens of each position, best first: what `Sampler` gives for `is_medusa`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

TOPK = 10
"""Guesses of each head."""
_NO_TOKEN = -1
"""Stands after the end of shorter branches; equal to no token."""


def pad_path(path: list[int], length: int, pad_value: int = -2) -> list[int]:
    """The path and as many `pad_value`s as it lacks to the length."""
    return path + [pad_value] * (length - len(path))


def generate_medusa_buffers(medusa_choices: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """What a tree of n nodes, root included, needs; CPU tensors.

    medusa_choices: the paths of all nodes but the root.

    - medusa_attn_mask [n, n] float32: 1 where the row's node attends to the column's: itself and those on its path.
    - tree_indices [n] int64: each node's token among the model's own, then `TOPK` of each head.
    - medusa_position_ids [n] int64: how far each node is from the root.
    - retrieve_indices [branches, depth + 1] int64: the nodes of each branch from the root to a leaf, longest first, -1 after the end.

    Raises ValueError for an empty tree, a node twice, a node without its parent, or a choice that is not below `TOPK`.
    """
    paths = [(), *sorted((tuple(path) for path in medusa_choices), key=lambda path: (len(path), path))]
    _check(paths)
    place = {path: i for i, path in enumerate(paths)}
    mask = torch.zeros(len(paths), len(paths))
    for path, i in place.items():
        mask[i, _places_along(path, place)] = 1
    parents = {path[:-1] for path in paths if path}
    branches = [_places_along(path, place) for path in reversed(paths) if path not in parents]
    longest = max(len(branch) for branch in branches)
    return {
        "medusa_attn_mask": mask,
        "tree_indices": torch.tensor([path[-1] + TOPK * (len(path) - 1) + 1 if path else 0 for path in paths]),
        "medusa_position_ids": torch.tensor([len(path) for path in paths]),
        "retrieve_indices": torch.tensor([pad_path(branch, longest, -1) for branch in branches]),
    }


def _places_along(path: tuple[int, ...], place: dict[tuple[int, ...], int]) -> list[int]:
    """From the root to the path's node."""
    return [place[path[:length]] for length in range(len(path) + 1)]


def _check(paths: list[tuple[int, ...]]) -> None:
    if len(paths) == 1 or () in paths[1:]:
        raise ValueError("medusa_choices must name at least one node, each by one choice or more, such as [[0], [1], [0, 0]]")
    known = set(paths)
    if len(known) < len(paths):
        raise ValueError(f"medusa_choices has a node twice: {next(list(p) for p in paths if paths.count(p) > 1)}")
    for path in paths[1:]:
        if not 0 <= path[-1] < TOPK:
            raise ValueError(f"medusa_choices has {list(path)}: a head has {TOPK} guesses, so that choices are 0 to {TOPK - 1}")
        if path[:-1] not in known:
            raise ValueError(f"medusa_choices has {list(path)} without {list(path[:-1])}, on whose way it is: add that node")


def generate_candidates(
    medusa_logits: torch.Tensor, logits: torch.Tensor, tree_indices: torch.Tensor, retrieve_indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of the branches [branches, depth + 1], with -1 after the end of shorter ones, and of the tree's nodes [1, n].

    medusa_logits: the heads' best tokens [heads, 1, 1, TOPK]. logits: the model's own [1, 1, at least 1].

    Raises ValueError for another number of tokens of a head, and for several sequences.
    """
    if medusa_logits.shape[-1] != TOPK or medusa_logits.shape[1:-1].numel() != 1 or logits.shape[:-1].numel() != 1:
        raise ValueError(
            f"medusa_logits {list(medusa_logits.shape)} and logits {list(logits.shape)}: wanted are the best tokens of one position of one sequence, "
            f"[heads, 1, 1, {TOPK}] and [1, 1, {TOPK}]"
        )
    guesses = torch.cat((logits.reshape(-1)[:1], medusa_logits.reshape(-1)))
    tree = guesses[tree_indices]
    padded = torch.cat((tree, tree.new_full((1,), _NO_TOKEN)))
    return padded[retrieve_indices], tree.unsqueeze(0)


def evaluate_posterior(logits: torch.Tensor, candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which branch is best, and how many of its guesses are accepted: int64 scalars, on the device of the candidates.

    logits: the best tokens that the model has after each node of each branch [branches, depth + 1, at least 1]. candidates: of `generate_candidates`.
    A guess is accepted if all before it are, and it is what the model says after them. Of equally good branches the first is taken.
    """
    agree = candidates[:, 1:] == logits[:, :-1, 0]
    lengths = agree.long().cumprod(dim=1).sum(dim=1)
    return lengths.argmax(), lengths.max()


def update_inference_inputs(
    input_ids: torch.Tensor,
    candidates: torch.Tensor,
    best_candidate: torch.Tensor | int,
    accept_length: torch.Tensor | int,
    retrieve_indices: torch.Tensor,
    outputs: Any,
    logits: torch.Tensor,
    medusa_logits: torch.Tensor,
    new_token: torch.Tensor | int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any, torch.Tensor]:
    """Take over the best branch: its first token, which is the model's own, and the guesses that are accepted.

    input_ids: the sequence so far [1, length]. logits [branches, depth + 1, TOPK] and medusa_logits [heads, branches, depth + 1, TOPK]: the best tokens after
    each node of each branch. new_token: tokens made so far. outputs is not used. The number accepted is read, as shapes depend on it.

    Returns (input_ids with the new tokens, logits [1, 1, TOPK] and medusa_logits [heads, 1, 1, TOPK] after the last of them, new_token, where their keys
    and values lie if the tree's come after `length` others).
    """
    best, end = int(best_candidate), int(accept_length) + 1
    select_indices = retrieve_indices[best, :end] + input_ids.shape[1]
    input_ids = torch.cat((input_ids, candidates[best : best + 1, :end]), dim=-1)
    return (
        input_ids,
        logits[best : best + 1, end - 1 : end],
        medusa_logits[:, best : best + 1, end - 1 : end],
        new_token + end,
        select_indices,
    )
