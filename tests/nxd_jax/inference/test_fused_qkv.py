"""One weight for queries, keys and values: ranks have the rows that they have of separate ones. Logits are compared in test_programs.py."""

from __future__ import annotations

import pytest
import torch

from nxd_jax.inference import CausalLM, InferenceConfig, building
from nxd_jax.trace.functions import shard_checkpoint
from nxd_jax.trace.parallel_context import NxDParallelState
from tests.nxd_jax.inference import small


@pytest.mark.parametrize(
    ("kind", "changes"), [("qwen2", {"num_attention_heads": 6, "hidden_size": 96, "num_key_value_heads": 2}), ("gpt2", {})]
)
def test_ranks_have_the_same_rows(kind: str, changes: dict[str, int]) -> None:
    """Heads that the ranks do not divide, copies of K/V heads, biases; Conv1D weights that are fused in another way."""
    theirs = small.model(kind, **changes)
    found = []
    for fused in (False, True):
        with NxDParallelState(world_size=4, tensor_model_parallel_size=4):
            ours = CausalLM(theirs.config, InferenceConfig(tp_degree=4, fused_qkv=fused), device="meta")
            found.append(shard_checkpoint(building.full_weights(ours, theirs.state_dict()), ours))
    for apart, together in zip(*found, strict=True):
        for attention in ("model.layers.0.self_attn", "model.layers.1.self_attn"):
            for end in ("weight", "bias"):
                rows = torch.cat([apart.pop(f"{attention}.{part}_proj.{end}") for part in "qkv"])
                assert torch.equal(together.pop(f"{attention}.Wqkv.{end}"), rows)
        assert apart.keys() == together.keys() and all(torch.equal(apart[name], together[name]) for name in apart)
