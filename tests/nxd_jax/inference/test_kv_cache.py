"""The cache's buffers, and programs of one's own that name lines."""

from __future__ import annotations

import pytest
import torch

from nxd_jax.inference import CausalLM, InferenceConfig, KVCacheManager, building
from nxd_jax.trace.functions import shard_checkpoint
from nxd_jax.trace.model_builder_v2 import ModelBuilder
from nxd_jax.trace.parallel_context import NxDParallelState
from tests.nxd_jax.inference import small


def test_lines_and_slots() -> None:
    cache = KVCacheManager(layers=2, lines=3, kv_heads=2, length=5, head_dim=4)
    assert [tuple(t.shape) for t in cache.past_key_values] == [(3, 2, 5, 4)] * 4
    assert not any(t.requires_grad or t.any() for t in cache.past_key_values)
    k, v = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4)
    cache.fill(1, k, v, torch.tensor([2, 0]))
    found_k, found_v = cache.get_cache(1, 3, torch.tensor([2, 0]))
    assert torch.equal(found_k, k) and torch.equal(found_v, v)
    assert not cache.past_key_values[2][1].any() and not cache.past_key_values[2][:, :, 3:].any()
    new = torch.randn(3, 2, 2, 4)
    cache.append(1, new, -new, torch.tensor([[0, 1], [2, 3], [3, 4]]))
    k_all, v_all = cache.get_cache(1)
    for line, slot in ((0, 0), (1, 2), (2, 3)):
        assert torch.equal(k_all[line, :, slot : slot + 2], new[line]) and torch.equal(v_all[line, :, slot : slot + 2], -new[line])
    assert torch.equal(k_all[2, :, :3], k[0])
    assert not cache.past_key_values[0].any()
    cache.fill(0, k, v)
    assert torch.equal(cache.get_cache(0)[0][:2, :, :3], k)


@pytest.mark.core(keep=0)
@pytest.mark.parametrize("length", [None, 12])
def test_later_tokens_of_some_lines(length: int | None) -> None:
    """A decode of two rows out of four lines; weights are cut with the builder's own calls."""
    model = small.model("qwen2")
    with NxDParallelState(world_size=2, tensor_model_parallel_size=2):
        ours = CausalLM(model.config, InferenceConfig(tp_degree=2, batch_size=4, seq_len=16), device="meta")
        ours.cache_length = length
        ids, two = torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        builder = ModelBuilder(ours).trace(kwargs={"input_ids": ids, "attention_mask": ids, "seq_ids": two}, tag="prefill")
        builder.trace(kwargs={"input_ids": ids[:, :1], "position_ids": two, "seq_ids": two}, tag="decode")
        weights = shard_checkpoint(building.full_weights(ours, model.state_dict()), ours)
    traced = builder.compile()
    traced.set_weights(weights)
    traced.to_neuron()
    first, second = small.prompts([8, 8])
    ids, ones = torch.tensor([first, second]), torch.ones(2, 8, dtype=torch.int64)
    traced(input_ids=ids, attention_mask=ones, seq_ids=torch.tensor([3, 1]))
    found = traced(input_ids=torch.tensor([[5], [6]]), position_ids=torch.tensor([8, 8]), seq_ids=torch.tensor([1, 3]))
    expected = [small.logits(model, [*second, 5])[-1], small.logits(model, [*first, 6])[-1]]
    torch.testing.assert_close(found[:, 0], torch.stack(expected), atol=1e-4, rtol=1e-4)


def test_what_forward_refuses(nxd) -> None:  # type: ignore[no-untyped-def]
    nxd(1)
    config = small.model("llama").config
    ours = CausalLM(config, InferenceConfig(), device="meta")
    ids = torch.zeros(1, 1, dtype=torch.int64)
    for given in ({}, {"attention_mask": ids, "position_ids": ids[0]}):
        with pytest.raises(ValueError, match="give attention_mask for prompts, or position_ids for later tokens, and not both"):
            ours(ids, **given)
    for said, asked, expected in (
        (torch.bfloat16, None, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.float16),
        (None, None, torch.float32),
    ):
        config.dtype = said
        assert {t.dtype for t in CausalLM(config, InferenceConfig(torch_dtype=asked), device="meta").parameters()} == {expected}
    config.model_type = "bert"
    with pytest.raises(ValueError, match="model_type 'bert' of config.json must be one of gpt2, llama, mistral, mixtral, qwen2"):
        CausalLM(config, InferenceConfig(), device="meta")
    config.model_type, config.rope_parameters = "llama", {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(NotImplementedError, match="rope_type 'dynamic' of config.json changes frequencies with the length"):
        CausalLM(config, InferenceConfig(), device="meta")
