"""Llama with parallel layers against transformers' on the same weights: the loss and every gradient."""

from __future__ import annotations

import pytest
import torch

from nxd_jax.training.models.hf_models.modeling_llama import LlamaForCausalLM
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.training.models import cases
from tests.nxd_jax.training.models.cases import LLAMA3, Case

SP = {"sequence_parallel_enabled": True}
GQA = {"qkv_linear": True}
CASES = [
    Case(4, 2, cp=2, ignored=3, options={**SP, **GQA, "use_ring_attention": True}, config={"rope_parameters": LLAMA3}),
    Case(2, 2, kv=4, ignored=3),
    Case(),
    Case(kv=4, options={"fuse_qkv": False, "transpose_nki_inputs": False}, config={"attention_bias": True, "mlp_bias": True}),
    Case(2, 1, config={"tie_word_embeddings": True}),
    Case(2, 2, options=SP, config={"tie_word_embeddings": True}),
    Case(2, 2, kv=4, options=GQA),
    Case(2, 2, options={**SP, "use_flash_attention": True}, config={"attention_bias": True}),
    Case(2, 2, kv=4, config={"attention_bias": True}),
    Case(2, cp=2, ignored=9, options={"use_ring_attention": True}),
    Case(4, 4, options=SP),
    Case(4, 4, options={**GQA, "kv_shared_group_size": 2, "fuse_qkv": False}, config={"attention_bias": True}),
    Case(4, 4, kv=1, options={"kv_shared_group_size": 4, "use_flash_attention": True}),
    Case(4, 4, heads=8, kv=4, options={"kv_shared_group_size": 2, **GQA}),
    Case(4, 2, config={"head_dim": 16}),
    Case(2, 2, config={"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    Case(2, 2, config={"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "max_position_embeddings": 8}),
    Case(2, 2, config={"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 8}}),
    Case(8, 4, cp=2, options={**SP, "use_ring_attention": True}),
    Case(2, 2, options={"use_flash_attention": True}, config={"pad_token_id": 3, "hidden_act": "gelu"}),
]


@pytest.mark.core(keep=1)
@pytest.mark.thorough(keep=5)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_transformers(case: Case, nxd: Nxd) -> None:
    nxd(case.world, tp=case.tp, cp=case.cp)
    want, config = cases.llama(case)
    model = cases.ours(LlamaForCausalLM, case, config, want)
    ids, labels = cases.batch(case)
    loss = want(input_ids=ids, labels=labels).loss
    loss.backward()
    torch.testing.assert_close(cases.step(model, case, ids, labels), loss.item(), rtol=1e-5, atol=1e-5)
    cases.check_gradients(model, want)
