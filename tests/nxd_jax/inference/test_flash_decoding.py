"""A K/V head's cache that several ranks share out: texts are what they are with copies, in fewer bytes. More kinds are in test_programs.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_jax.inference import CausalLM, InferenceConfig, LanguageModel
from nxd_jax.tensor_parallel.head_plans import GQA
from nxd_jax.trace.parallel_context import NxDParallelState
from tests.nxd_jax.inference import small


def test_a_prompt_and_later_tokens(tmp_path: Path) -> None:
    """One token, and three at once, of which each rank of a pair has those at even or at odd positions; the other line is not disturbed."""
    theirs = small.folder(tmp_path, "llama")
    options = InferenceConfig(
        tp_degree=4, batch_size=2, seq_len=17, max_context_length=7, speculation_length=3, flash_decoding_enabled=True, fused_qkv=True
    )
    model = LanguageModel.from_pretrained(tmp_path, options)
    first, second = small.prompts([11, 7])
    found = [
        *model.prefill([first[:7], second], [1, 0]),
        model.decode([0, first[7]], [16, 7])[1],
        *model.score([[0] * 3, first[8:]], [0, 8])[1],
    ]
    expected = small.logits(theirs, first)[6:]
    expected = torch.cat([expected[:1], small.logits(theirs, second)[6:], expected[1:]])
    torch.testing.assert_close(torch.stack(found), expected, atol=1e-4, rtol=1e-4)
    model.prefill([second], [0])
    again = model.decode([5, first[10]], [7, 10])
    torch.testing.assert_close(again, torch.stack([small.logits(theirs, [*second, 5])[-1], expected[-1]]), atol=1e-4, rtol=1e-4)
    cache = [model.nxd_model.read_from_neuron_buffer(f"kv_mgr.past_key_values.{k}", rank) for k in range(4) for rank in range(4)]
    assert {tuple(t.shape) for t in cache} == {(2, 1, 9 + 1, 16)}


@pytest.mark.parametrize(
    ("tp", "gqa", "words"),
    [
        (2, None, "2 K/V heads on 2 ranks have none: leave it out, or set tp_degree to a multiple of 2 above it"),
        (3, None, "2 K/V heads on 3 ranks have none (gqa)"),
        (4, GQA.CONVERT_TO_MHA, "2 K/V heads on 4 ranks have none (gqa)"),
    ],
)
def test_heads_without_copies(tp: int, gqa: Any, words: str) -> None:
    options = InferenceConfig(tp_degree=tp, gqa=gqa, flash_decoding_enabled=True)
    with NxDParallelState(world_size=tp, tensor_model_parallel_size=tp), pytest.raises(ValueError) as error:
        CausalLM(small.model("llama").config, options, device="meta")
    assert "flash_decoding_enabled shares out the cache of a K/V head" in str(error.value) and words in str(error.value)
