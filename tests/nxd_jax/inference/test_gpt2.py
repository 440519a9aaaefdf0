"""GPT-2: its weights, and what is refused. Its logits are compared in test_programs.py, its texts in test_generation.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from nxd_jax.inference import CausalLM, InferenceConfig, building
from tests.nxd_jax.inference import small


def test_weights_by_both_kinds_of_names(nxd: Any) -> None:
    """Those that transformers writes now, and the older ones without "transformer."."""
    nxd(1)
    theirs = small.model("gpt2")
    ours = CausalLM(theirs.config, InferenceConfig(), device="meta")
    state = theirs.state_dict()
    older = {name.removeprefix("transformer."): tensor for name, tensor in state.items() if name != "lm_head.weight"}
    found = building.full_weights(ours, older)
    assert {name: tuple(t.shape) for name, t in found.items()} == {
        name: tuple(p.shape) for name, p in ours.named_parameters() if p.requires_grad
    }
    q, k, v = state["transformer.h.1.attn.c_attn.weight"].t().chunk(3)
    for name, expected in (("q", q), ("k", k), ("v", v)):
        assert torch.equal(found[f"model.layers.1.self_attn.{name}_proj.weight"], expected)
    assert torch.equal(found["model.layers.0.mlp.up_proj.bias"], state["transformer.h.0.mlp.c_fc.bias"])
    for name, same in building.full_weights(ours, state).items():
        assert torch.equal(found[name], same)
    del older["h.0.attn.c_attn.bias"], older["wpe.weight"]
    with pytest.raises(KeyError, match=re.escape("the model's files have no h.0.attn.c_attn.bias, wpe.weight")):
        building.full_weights(ours, older)


def test_what_is_refused(nxd: Any) -> None:
    nxd(1)
    config = small.model("gpt2").config
    with pytest.raises(ValueError, match=r"seq_len=256 is more than the 128 positions that the gpt2 model has learned: lower it"):
        CausalLM(config, InferenceConfig(seq_len=256), device="meta")
    config.scale_attn_by_inverse_layer_idx = True
    with pytest.raises(
        NotImplementedError, match=r"scale_attn_by_inverse_layer_idx=True of config.json is not supported for gpt2, only False"
    ):
        CausalLM(config, InferenceConfig(), device="meta")
