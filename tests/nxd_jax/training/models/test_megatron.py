"""Megatron GPT against transformers' models with the same weights: the masked loss and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.training.models import megatron_cases
from tests.nxd_jax.training.models.megatron_cases import Case

SP = {"sequence_parallel": True}
CASES = [
    Case("gpt2", 2, 2, options=SP),
    Case("mixtral", 2, 2, kv=2, options=SP),
    Case("mistral", 4, 2, kv=2),
    Case("gpt2"),
    Case("gpt2", 4, 2, options={"fp32_residual_connection": True, "apply_query_key_layer_scaling": False}),
    Case("gpt2", 2, 2, options={**SP, "openai_gelu": True}, config={"activation_function": "gelu_new"}),
    Case("llama"),
    Case("llama", 4, 4, options=SP),
    Case("llama", 2, 2, kv=2, options=SP),
    Case("llama", 2, 2, kv=2, options={"position_freq_base": 500.0, "position_abf_factor": 20.0}),
    Case(
        "llama",
        options={"position_interpolation_factor": 2.0},
        config={"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    Case("llama", options={"kv_channels": 16}, config={"head_dim": 16}),
    Case("mistral", 2, 2, kv=2, options=SP),
    Case("mixtral", 2, 1, ep=2),
    Case("mixtral", 4, 2, ep=2, kv=2, options={**SP, "moe_capacity_factor": 0.0}),
    Case("mixtral", 2, 2, options={"output_router_logits": False}),
    Case("every second", 2, 2),
    Case("mixtral", 2, 1, options={"output_router_logits": False, "token_shuffle_group_size": 2}),
    Case("mixtral", 4, 2, options={**SP, "output_router_logits": False, "token_shuffle_group_size": 2}),
]


def balance(case: Case) -> Any:
    """The part of the loss that keeps experts equally busy: transformers' auxiliary loss divided by the experts of a token."""
    options = megatron_cases.arguments(case)
    if not options.get("output_router_logits"):
        return lambda out: 0.0
    count, k = options["num_moe_experts"], options["moe_top_k"]
    return lambda out: options["router_aux_loss_coef"] * load_balancing_loss_func(out.router_logits, count, k) / k


@pytest.mark.core(keep=2)
@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_transformers(case: Case, nxd: Nxd) -> None:
    nxd(case.world, tp=case.tp, ep=case.ep)
    want = megatron_cases.reference(case)
    model = megatron_cases.ours(case, want)
    columns = megatron_cases.batch()
    loss = megatron_cases.expected(want, *columns, more=balance(case))
    found = megatron_cases.step(model, bool(case.options.get("sequence_parallel")), *columns)
    torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-5)
    megatron_cases.check_gradients(case, model, want, rtol=2e-4)
