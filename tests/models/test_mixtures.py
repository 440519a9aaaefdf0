"""transformers' own models with experts, unchanged on device xla: as eager torch with a loop over experts, in one program, whatever the routing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import torch_bridge
from tests.models.zoo import DECODER, VOCAB
from torch_bridge import metrics
from torch_bridge.recorder.dispatch import STATE
from torch_bridge.runtime import executor

torch_bridge.register()

WIDTH = 20
"""Of an expert: rows of 16 bytes in float32, and no more."""
ROUTED: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=WIDTH)


def _mixtral(experts: int) -> Any:
    return hf.MixtralConfig(**{**DECODER, "intermediate_size": WIDTH}, num_local_experts=experts, output_router_logits=True)


def _qwen2(experts: int) -> Any:
    return hf.Qwen2MoeConfig(
        **DECODER, **ROUTED, num_experts=experts, shared_expert_intermediate_size=24, decoder_sparse_step=1, output_router_logits=True
    )


def _qwen3(experts: int) -> Any:
    return hf.Qwen3MoeConfig(**DECODER, **ROUTED, head_dim=8, num_experts=experts, norm_topk_prob=True, output_router_logits=True)


def _deepseek(experts: int) -> Any:
    latent = dict(kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)
    groups = dict(n_routed_experts=experts, n_group=4, topk_group=2, first_k_dense_replace=1, n_shared_experts=1)
    return hf.DeepseekV3Config(**{**DECODER, "num_key_value_heads": 4}, **ROUTED, **latent, **groups)


def _gpt_oss(experts: int) -> Any:
    """Its experts have biases, are as wide as `intermediate_size`, and lie turned."""
    kinds = ["sliding_attention", "full_attention"]
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    sizes = {**DECODER, "intermediate_size": WIDTH}
    return hf.GptOssConfig(
        **sizes, head_dim=8, num_local_experts=experts, num_experts_per_tok=2, layer_types=kinds, sliding_window=8, rope_parameters=rope
    )


def _dbrx(experts: int) -> Any:
    heads = dict(
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=32,
        vocab_size=VOCAB,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
    )
    return hf.DbrxConfig(**heads, ffn_config={"moe_num_experts": experts, "moe_top_k": 2, "ffn_hidden_size": WIDTH, "hidden_size": 32})


def _olmoe(experts: int) -> Any:
    sizes = {**DECODER, "intermediate_size": WIDTH}
    return hf.OlmoeConfig(**sizes, num_experts=experts, num_experts_per_tok=2, output_router_logits=True)


def _phimoe(experts: int) -> Any:
    sizes = {**DECODER, "intermediate_size": WIDTH}
    return hf.PhimoeConfig(**sizes, num_local_experts=experts, num_experts_per_tok=2)


GROUPED: dict[str, Callable[[int], Any]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2,
    "qwen3_moe": _qwen3,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
    "olmoe": _olmoe,
    "phimoe": _phimoe,
}
RANDOM = ("phimoe",)
"""Routers that draw in training."""
ALL = [pytest.param(name, marks=pytest.mark.thorough) if name in ("olmoe", "phimoe") else name for name in GROUPED]


def pair(config: Callable[[int], Any], experts: int = 8, **options: Any) -> tuple[Any, Any]:
    """On the CPU with a loop over experts, and on xla as the configuration says; of the same weights, with routers that prefer some experts."""
    torch.manual_seed(0)
    plain = hf.AutoModelForCausalLM.from_config(config(experts), experts_implementation="eager")
    for name, p in plain.named_parameters():
        if ("gate.weight" in name or "router" in name) and p.dim() == 2 and p.shape[0] == experts:
            nn.init.normal_(p, std=0.3)
    model = hf.AutoModelForCausalLM.from_config(config(experts), **options)
    model.load_state_dict(plain.state_dict())
    return plain, model.to("xla")


def trained(model: Any, ids: torch.Tensor) -> Any:
    """The result of a batch, after its backward pass."""
    found = model(input_ids=ids, labels=ids)
    found.loss.backward()
    return found


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(seed))


def agree(plain: Any, model: Any, wanted: Any, found: Any) -> None:
    torch.testing.assert_close(found.loss.cpu(), wanted.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.logits.cpu(), wanted.logits, rtol=1e-4, atol=1e-5)
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        if p.grad is not None:
            scale = p.grad.abs().max().item()
            torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-4, atol=1e-6 + 1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("name", GROUPED)
def test_as_a_loop_over_experts(name: str) -> None:
    plain, model = pair(GROUPED[name])
    if name in RANDOM:
        plain.eval(), model.eval()
    assert model.config._experts_implementation == "grouped_mm"
    wanted = trained(plain, batch())
    torch.xla.synchronize()
    metrics.clear_counters()
    executions = metrics.EXECUTE_TIME.count
    found = trained(model, batch().to("xla"))
    torch.xla.synchronize()
    assert metrics.EXECUTE_TIME.count - executions == 1
    assert [op for op in metrics.COUNTERS if op.startswith("aten::")] == []
    agree(plain, model, wanted, found)


@pytest.mark.parametrize("name", ALL)
def test_as_many_ops_for_twice_the_experts(name: str) -> None:
    counts = []
    for experts in (8, 16):
        _, model = pair(GROUPED[name], experts)
        torch.xla.synchronize()
        trained(model, batch().to("xla"))
        counts.append(len(STATE.session.current.nodes))
        model.zero_grad()  # nobody needs them: nothing is compiled
        torch.xla.synchronize()
    assert counts[0] == counts[1] > 100


def test_one_program_whatever_the_routing() -> None:
    """Also if all tokens go to the same two experts."""
    plain, model = pair(_mixtral)
    executor.clear_cache()  # other tests train the same model
    metrics.clear_counters()
    for step in range(3):
        if step == 2:
            for chosen in (plain, model):
                for layer in chosen.model.layers:
                    gate = layer.mlp.gate.weight  # with equal logits the first experts win; zero_() would be part of the step
                    gate.data.copy_(torch.zeros_like(gate, device="cpu"))
        for chosen in (plain, model):
            chosen.zero_grad()
        wanted, found = trained(plain, batch(step)), trained(model, batch(step).to("xla"))
        torch.xla.synchronize()
        agree(plain, model, wanted, found) if step < 2 else None
    assert torch.isfinite(found.loss.cpu())
    assert metrics.COUNTERS["UncachedCompile"] == 1


def test_a_loop_that_is_asked_for() -> None:
    """`experts_implementation="eager"` loops over the experts that have tokens: the values are read on the way, and they are right."""
    plain, model = pair(_mixtral, experts_implementation="eager")
    executions = metrics.EXECUTE_TIME.count
    wanted, found = trained(plain, batch()), trained(model, batch().to("xla"))
    agree(plain, model, wanted, found)
    assert metrics.EXECUTE_TIME.count - executions > 1


def test_a_model_that_always_loops() -> None:
    """transformers has no grouped experts for Dbrx, so it reads which experts have tokens, and runs one program after the other; the values are right."""
    plain, model = pair(_dbrx, 4)
    assert model.config._experts_implementation == "eager"
    agree(plain, model, trained(plain, batch()), trained(model, batch().to("xla")))
