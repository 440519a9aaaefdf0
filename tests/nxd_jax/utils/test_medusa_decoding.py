"""The loop around a Medusa model: greedy decoding's tokens, out of a cache whose entries have to be moved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nxd_jax.utils.speculative_decoding import NeuronSpeculation
from tests.nxd_jax.utils.toy_medusa import best_after, greedy, grown, heads_after

SMALL = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
END = 11


class Model(NeuronSpeculation):
    """A cache of tokens by position; what a node says is of the cache as far as the mask goes, and of the nodes that it sees."""

    def __init__(self, tree: list[list[int]], hit: float) -> None:
        self.heads = max(len(path) for path in tree) + 1  # one more than the tree uses
        self.hit = hit
        self.neuron_config = SimpleNamespace(is_medusa=True, medusa_tree=tree, medusa_speculation_length=len(tree) + 1)
        self.cache: dict[int, int] = {}
        self.passes = 0

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **given: Any) -> dict[str, Any]:
        return {"input_ids": input_ids, **given}

    def prepare_medusa_inputs_for_generation(self, input_ids: torch.Tensor, **given: Any) -> dict[str, Any]:
        return {"input_ids": input_ids, "tree": True, **given}

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool, tree: bool = False, **given: Any) -> Any:
        length = int(attention_mask.sum())
        assert use_cache and attention_mask[0, :length].all()
        tokens = input_ids[0].tolist()
        if not tree:
            self.cache = dict(enumerate(tokens[:length]))
            return self.said([tokens[:length]])
        self.passes += 1
        read, write = given["accepted_indices"][0].tolist(), given["current_length"][0].tolist()
        assert len(read) == len(write) == self.heads + 1
        self.cache.update(zip(write, [self.cache.get(i, -1) for i in read], strict=True))
        before = [self.cache[i] for i in range(length)]
        self.cache.update(zip(given["scatter_index"][0].tolist(), tokens, strict=True))
        sees = [[k for k, one in enumerate(row) if one] for row in given["medusa_mask"][0].tolist()]
        assert given["position_ids"][0].tolist() == [length + len(nodes) - 1 for nodes in sees]
        return self.said([before + [tokens[k] for k in nodes] for nodes in sees])

    def said(self, texts: list[list[int]]) -> dict[str, torch.Tensor]:
        guesses = [heads_after(text, self.heads, self.hit) for text in texts]
        return {
            "hidden_states": torch.tensor([[best_after(t) for t in texts], *([g[h] for g in guesses] for h in range(self.heads))]).int()
        }


def generated(model: Model, prompt: list[int], limit: int, padding: int = 3, **given: Any) -> list[int]:
    ids = torch.tensor([prompt + [0] * padding])
    mask = torch.tensor([[1] * len(prompt) + [0] * padding])
    criteria = [SimpleNamespace(max_length=limit)]
    return model._assisted_decoding(ids, None, False, criteria, attention_mask=mask, use_cache=True, **given)[0].tolist()


@pytest.mark.core(keep=4)
@pytest.mark.parametrize("hit", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("tree", [SMALL, [[4]], grown(1), grown(2)], ids=["small", "one", "grown", "other"])
def test_the_tokens_are_those_of_greedy_decoding(tree: list[list[int]], hit: float) -> None:
    """Exactly as many as asked for, or up to an end token. Zeros in the text and in the padding are tokens like others."""
    for start in range(4):
        prompt = [start, 0, 5]
        for limit in (4, 9, 25):
            assert generated(Model(tree, hit), prompt, limit, padding=start) == greedy(prompt, limit - 3)
            assert generated(Model(tree, hit), prompt, limit, eos_token_id=[END, 7]) == greedy(prompt, limit - 3, (END, 7))


def test_right_guesses_save_forward_passes() -> None:
    tree = [[i] for i in range(3)] + [[i, j] for i in range(3) for j in range(3)]
    model, other = Model(tree, 1.0), Model([[4]], 0.0)
    assert generated(model, [2], 31) == generated(other, [2], 31)
    assert model.passes == 10 and other.passes > 20


def test_without_a_mask() -> None:
    ids = torch.tensor([[3, 4]])
    criteria = [SimpleNamespace(max_length=9)]
    assert Model(SMALL, 0.5)._assisted_decoding(ids, None, False, criteria, use_cache=True)[0].tolist() == greedy([3, 4], 7)


def test_errors() -> None:
    model = Model(SMALL, 1.0)
    model.neuron_config.medusa_speculation_length = 7
    with pytest.raises(ValueError, match="medusa_speculation_length=7, and medusa_tree has 8 nodes with its root: these must be equal"):
        generated(model, [1], 9)
    with pytest.raises(ValueError, match="stopping_criteria has no max_length"):
        model._assisted_decoding(torch.tensor([[1]]), None)
