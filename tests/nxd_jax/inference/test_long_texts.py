"""64 tokens one by one, through three programs whose caches are of other lengths, give what transformers' eager model gives for the whole text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nxd_jax.inference import building
from nxd_jax.inference.config import InferenceConfig
from tests.nxd_jax.inference import small

PROMPT, LATER, BUCKETS = 6, 64, (24, 48, 72)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "llama, K/V heads with copies": ("llama", {}, {"tp_degree": 4}),
    "llama, padded heads": ("llama", {"num_attention_heads": 6, "hidden_size": 96}, {"tp_degree": 4}),
    "mixtral": ("mixtral", {}, {"tp_degree": 2}),
    "mixtral, experts shared out": ("mixtral", {}, {"tp_degree": 2, "ep_degree": 2}),
}


@pytest.mark.core(keep=0)
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("case", CASES)
def test_a_long_text(case: str) -> None:
    kind, changes, ranks = CASES[case]
    theirs = small.model(kind, num_hidden_layers=1, **changes)
    options = InferenceConfig(seq_len=BUCKETS[-1], max_context_length=PROMPT, decode_buckets=BUCKETS, **ranks)
    ours = building.build(theirs.config, options, theirs.state_dict())
    ours.to_neuron()
    (text,) = small.prompts([PROMPT + LATER])
    prompt = {"input_ids": torch.tensor([text[:PROMPT]]), "attention_mask": torch.ones(1, PROMPT, dtype=torch.int64)}
    found = [ours(**prompt)[0]]
    for place in range(PROMPT, PROMPT + LATER):
        slots = next(n for n in BUCKETS if place < n)
        inputs = {"input_ids": torch.tensor([[text[place]]]), "position_ids": torch.tensor([place])}
        found.append(ours(**inputs, model_name=building.decode_tag(slots))[0, 0])
    torch.testing.assert_close(torch.stack(found), small.logits(theirs, text)[PROMPT - 1 :], rtol=1e-4, atol=1e-4)
