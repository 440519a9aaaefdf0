"""`generate()` in a process that hosts several ranks: each gets what it would alone, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.torch_bridge.generation import models
from tests.torch_bridge.generation.models import generated, on_cpu, on_xla, padded, program_calls, prompt
from tests.torch_bridge.ranks import eager
from tests.torch_bridge.ranks.conftest import Hosted, hosted  # noqa: F401


@pytest.fixture(autouse=True)
def two_ranks(hosted: Hosted) -> None:  # noqa: F811
    hosted(2, dp=2)


def test_one_prompt_for_all() -> None:
    ids, mask = padded((6, 4))
    model = on_xla("llama")
    for options in ({}, {"do_sample": True}):
        chosen = {"attention_mask": mask, "max_new_tokens": 12, **options}
        assert generated(model, ids, **chosen).tolist() == generated(on_cpu("llama"), ids, **chosen).tolist()


def test_tokens_that_are_calls_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all ranks at once."""
    calls = program_calls(monkeypatch)
    ids, mask = padded((6, 4))
    model = on_xla("gpt2")
    options = {"attention_mask": mask, "max_new_tokens": 24, "eos_token_id": None}
    expected = generated(on_cpu("gpt2"), ids, **options)
    for _ in range(2):
        calls.clear()
        torch.testing.assert_close(generated(model, ids, **options), expected, rtol=0, atol=0)
    assert len(calls) > 18


def test_a_prompt_for_each() -> None:
    """Ranks draw what each would alone."""
    ids = [prompt(1, 6, seed=r) for r in range(2)]
    reference, model = on_cpu("llama"), on_xla("llama")
    model.generation_config.eos_token_id = None
    for options in ({}, {"do_sample": True}):
        expected = [generated(reference, x, eos_token_id=127, max_new_tokens=8, **options) for x in ids]
        torch.manual_seed(1)
        eager.same(model.generate(eager.on_xla(ids), **{"do_sample": False, "max_new_tokens": 8, **options}), expected)


def test_prompts_that_would_end_differently_are_refused() -> None:
    model = on_xla("llama")
    ids = eager.on_xla([prompt(1, 6, seed=r) for r in range(2)])
    with pytest.raises(NotImplementedError, match=r"a prompt that differs by rank, and an end token and beams: .*eos_token_id = None"):
        model.generate(ids, max_new_tokens=3, num_beams=2)


def test_a_part_of_the_vocabulary_is_refused() -> None:
    model = on_xla("llama")

    class Half(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x[..., : models.WORDS // 2]

    model.lm_head = Half()
    with pytest.raises(ValueError, match=r"logits of 64 tokens on each rank, and the vocabulary has 128: .*gather_output=True"):
        model.generate(prompt(1, 6).to("xla"), max_new_tokens=3)
