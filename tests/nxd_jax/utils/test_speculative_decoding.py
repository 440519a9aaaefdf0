"""Speculative decoding gives greedy decoding's tokens: with drafts that are right, wrong, and in between, near the end, and with end tokens."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nxd_jax.utils.speculative_decoding import NeuronSpeculation, accept

VOCABULARY = 11
PAD, END = 10, 9


def after(text: list[int]) -> int:
    """The toy model's next token, of the whole text. Ends now and then."""
    return random.Random(f"model {text}").choice([*range(VOCABULARY - 2)] * 3 + [END])


class Toy:
    """What an adapter of a traced model does: a cache of positions, filled by the prompt and then written where position_ids say.

    hit: how often it says what `after` says.
    """

    def __init__(self, hit: float = 1.0) -> None:
        self.hit = hit
        self.cache: dict[int, int] = {}
        self.kv_cache_populated = False
        self.calls: list[int] = []
        self.highest = 0

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        assert kwargs == {"use_cache": True}
        places = torch.arange(input_ids.shape[1])[None]
        if self.kv_cache_populated:
            input_ids, places = input_ids[:, -1:], attention_mask.sum(1, keepdim=True)
        return {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": places}

    def _update_model_kwargs_for_generation(
        self, outputs: Any, kwargs: dict[str, Any], decoding: bool, is_encoder_decoder: bool
    ) -> dict[str, Any]:
        mask = kwargs["attention_mask"]
        return {**kwargs, "attention_mask": torch.cat((mask.new_ones(1, 1), mask), 1) if decoding else mask}

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor) -> Any:
        if not self.kv_cache_populated:
            length = int(attention_mask.sum())
            self.cache = dict(enumerate(input_ids[0, :length].tolist()))
            places = [length - 1]
        else:
            places = position_ids[0].tolist()
            assert int(attention_mask.sum()) == places[0]
            self.cache.update(zip(places, input_ids[0].tolist(), strict=True))
        self.kv_cache_populated = True
        self.calls.append(len(places))
        self.highest = max(self.highest, *places)
        return SimpleNamespace(logits=torch.nn.functional.one_hot(torch.tensor([[self.said(p) for p in places]]), VOCABULARY).float())

    def said(self, place: int) -> int:
        text = [self.cache[i] for i in range(place + 1)]
        draw = random.Random(f"draft {text}")
        return after(text) if draw.random() < self.hit else draw.randrange(VOCABULARY - 1)


class Adapter(Toy, NeuronSpeculation):
    def __init__(self, speculation_length: int = 4) -> None:
        super().__init__()
        self.config = SimpleNamespace(speculation_length=speculation_length, is_medusa=False)
        self.generation_config = SimpleNamespace(eos_token_id=END, pad_token_id=PAD)


def greedy(prompt: list[int], limit: int, ends: tuple[int, ...] = (END,)) -> list[int]:
    text = list(prompt)
    while len(text) < limit:
        text.append(after(text))
        if text[-1] in ends:
            break
    return text


def drafting(steps: int, hit: float) -> Any:
    model = Toy(hit)
    model.num_assistant_tokens = steps  # type: ignore[attr-defined]
    return SimpleNamespace(assistant_model=model)


def generated(target: Adapter, draft: Any, prompt: list[int], limit: int, **kwargs: Any) -> list[int]:
    """With the prompt padded on the right."""
    padding = 3
    ids = torch.tensor([prompt + [PAD] * padding])
    mask = torch.tensor([[1] * len(prompt) + [0] * padding])
    criteria = [SimpleNamespace(max_time=5), SimpleNamespace(max_length=limit)]
    given = {"stopping_criteria": criteria, "attention_mask": mask, "use_cache": True, **kwargs}
    return target._assisted_decoding(ids, draft, **given)[0].tolist()


@pytest.mark.thorough(keep=25)
@pytest.mark.core(keep=4)
@pytest.mark.parametrize("steps", [1, 3, 4, 9])
@pytest.mark.parametrize("length", [1, 2, 4, 7])
@pytest.mark.parametrize("hit", [0.0, 0.7, 1.0])
def test_the_tokens_are_those_of_greedy_decoding(length: int, steps: int, hit: float) -> None:
    """Exactly as long as max_length, or up to the end token; positions beyond max_length are not written."""
    for start in range(8):
        for limit in (3, 4, 10, 24):
            target = Adapter(length)
            prompt = [start, 3]
            assert generated(target, drafting(steps, hit), prompt, limit) == greedy(prompt, limit)
            assert target.highest < limit


def test_right_drafts_save_forward_passes() -> None:
    ends = (100,)
    target = Adapter(4)
    found = generated(target, drafting(4, 1.0), [1, 2], 30, eos_token_id=list(ends))
    assert found == greedy([1, 2], 30, ends)
    assert target.calls[:7] == [1] + [4] * 6  # the prompt, then 4 tokens at a time
    wrong = Adapter(4)
    assert generated(wrong, drafting(4, 0.0), [1, 2], 30, eos_token_id=list(ends)) == found
    assert len(wrong.calls) > 20


def test_several_end_tokens_and_no_end_token() -> None:
    ends = (END, 3, 4)
    assert generated(Adapter(5), drafting(5, 0.8), [6], 40, eos_token_id=list(ends)) == greedy([6], 40, ends)
    target = Adapter(5)
    target.generation_config = SimpleNamespace(eos_token_id=None, pad_token_id=None)
    assert generated(target, drafting(5, 0.8), [6], 40) == greedy([6], 40, ())


def test_without_a_mask_and_with_transformers_criteria() -> None:
    generation = pytest.importorskip("transformers.generation")
    criteria = generation.StoppingCriteriaList([generation.MaxLengthCriteria(20)])
    draft = Toy(0.8)
    draft.generation_config = SimpleNamespace(num_assistant_tokens=3)  # type: ignore[attr-defined]
    generator = SimpleNamespace(assistant_model=draft)
    found = Adapter(4)._assisted_decoding(torch.tensor([[5, 6]]), generator, stopping_criteria=criteria, use_cache=True)
    assert found[0].tolist() == greedy([5, 6], 20)


def test_a_model_that_gives_logits_of_the_whole_prompt() -> None:
    class Whole(Adapter):
        def __call__(self, **given: Any) -> Any:
            first = not self.kv_cache_populated
            logits = super().__call__(**given).logits
            if first:
                wide = torch.zeros(1, given["input_ids"].shape[1], VOCABULARY)
                wide[:, int(given["attention_mask"].sum()) - 1] = logits[:, 0]
                logits = wide
            return SimpleNamespace(logits=logits)

    assert generated(Whole(4), drafting(4, 0.8), [2, 2], 20) == greedy([2, 2], 20)


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize(
    ("drafted", "said", "expected"),
    [
        ([4, 5, 6], [4, 5, 6, 7], [4, 5, 6, 7]),
        ([4, 5, 6], [4, 0, 6, 7], [4, 0]),
        ([4, 5, 6], [1, 5, 6, 7], [1]),
        ([], [3], [3]),
        ([4], [4, 8, 0, 0], [4, 8]),
    ],
)
def test_the_rule(drafted: list[int], said: list[int], expected: list[int], device: str) -> None:
    found = accept(torch.tensor([drafted], dtype=torch.long, device=device), torch.tensor([said], device=device))
    assert found.tolist() == [expected]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"do_sample": True}, ValueError, "do_sample=True: speculation is greedy"),
        ({"stopping_criteria": None}, ValueError, "stopping_criteria has no max_length: add transformers.MaxLengthCriteria"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]])}, ValueError, "zeros before its ones: .*padding_side='right'"),
    ],
)
def test_arguments(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        generated(Adapter(), drafting(3, 1.0), [1], 9, **change)


def test_models() -> None:
    with pytest.raises(ValueError, match=r"input_ids has shape \[2, 3\]: speculation takes one sequence at a time"):
        Adapter()._standard_assisted_decoding(torch.zeros(2, 3).long(), Toy(), [SimpleNamespace(max_length=9)], None, None)
    with pytest.raises(ValueError, match="speculation_length=0 of the model's configuration must be 1 or more"):
        generated(Adapter(0), drafting(3, 1.0), [1], 9)
    target = Adapter()
    target.generation_config.pad_token_id = None
    with pytest.raises(ValueError, match="eos_token_id=9 is given without pad_token_id"):
        generated(target, drafting(3, 1.0), [1], 9)
