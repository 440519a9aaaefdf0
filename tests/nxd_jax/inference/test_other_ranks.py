"""Weights of language models that were cut for other ranks are what `shard_checkpoint` cuts: padded vocabularies and widths, heads, their copies, experts."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from nxd_jax.inference import CausalLM, InferenceConfig, building
from nxd_jax.inference.lora_serving import LoraServingConfig
from nxd_jax.trace import cuts, resharding
from nxd_jax.trace.functions import shard_checkpoint
from nxd_jax.trace.parallel_context import NxDParallelState
from tests.nxd_jax.inference import small
from torch_bridge.aot import facts

CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama, copies from 8 ranks on": ("llama", {"num_key_value_heads": 4}, {"fused_qkv": True}),
    "llama, padded heads": ("llama", {"num_key_value_heads": 4, "num_attention_heads": 12, "hidden_size": 96}, {}),
    "qwen2, padded heads": ("qwen2", {"num_attention_heads": 6, "hidden_size": 96}, {}),
    "qwen2, adapters": ("qwen2", {}, {"lora_config": LoraServingConfig(max_loras=1, max_lora_rank=2, target_modules=("q_proj", "o_proj"))}),
    "llama, quantized": ("llama", {"intermediate_size": 90}, {"quantized": True, "quantization_type": "per_channel_symmetric"}),
    "gpt2": ("gpt2", {}, {"fused_qkv": True}),
    "mixtral": ("mixtral", {}, {}),
}
RANKS = [(1, 1), (2, 1), (4, 1), (8, 1)]
OF_EXPERTS = [(1, 2), (2, 2), (1, 4)]
GRID = [(case, *both) for case in CASES for both in itertools.permutations(RANKS + OF_EXPERTS if case == "mixtral" else RANKS, 2)]
FEW = [
    ("llama", (1, 1), (2, 1)),
    ("llama, copies from 8 ranks on", (4, 1), (8, 1)),
    ("qwen2, padded heads", (2, 1), (4, 1)),
    ("llama, quantized", (4, 1), (2, 1)),
    ("mixtral", (2, 2), (4, 1)),
]


@functools.cache
def cut(case: str, ranks: tuple[int, int]) -> tuple[dict[str, facts.Held], list[dict[str, torch.Tensor]]]:
    """What a model's files say of its weights, and the weights of each rank."""
    kind, changes, options = CASES[case]
    theirs = small.model(kind, num_hidden_layers=1, **changes)
    tp, ep = ranks
    with NxDParallelState(world_size=tp * ep, tensor_model_parallel_size=tp, expert_model_parallel_size=ep):
        ours = CausalLM(theirs.config, InferenceConfig(tp_degree=tp, ep_degree=ep, **options), device="meta")
        weights = shard_checkpoint(building.full_weights(ours, theirs.state_dict()), ours)
        factors = {name: torch.randn(p.shape) for name, p in ours.named_parameters() if "lora_A" in name and "q_proj" in name}
        describe = cuts.describe_in(ours)
        held = {
            name: facts.Held(name, tuple(p.shape), p.dtype, not describe(p)[0], describe(p)[1])
            for name, p in ours.named_parameters()
            if name in weights[0] or name in factors
        }
    return held, weights


def check(case: str, given: tuple[int, int], ranks: tuple[int, int]) -> None:
    held, wanted = cut(case, ranks)
    found = resharding.resharded(cut(case, given)[1], held, len(wanted))
    for own, state in zip(found, wanted, strict=True):
        assert own.keys() == state.keys()
        for name, t in state.items():
            assert torch.equal(own[name], t), name


@pytest.mark.parametrize(("case", "given", "ranks"), FEW)
def test_a_few(case: str, given: tuple[int, int], ranks: tuple[int, int]) -> None:
    check(case, given, ranks)


@pytest.mark.thorough(keep=12)
@pytest.mark.core(keep=0)
@pytest.mark.parametrize(("case", "given", "ranks"), GRID)
def test_all(case: str, given: tuple[int, int], ranks: tuple[int, int]) -> None:
    check(case, given, ranks)
