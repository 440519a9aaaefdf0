"""Training only adapters: Hugging Face PEFT's losses from the same weights, and the unsharded model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nxd_jax.modules.lora import LoraConfig, LoraModel, peft_format
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.lora.models import PROJECTIONS, llama, losses, parallel

RTOL = 1e-4

CASES: dict[str, dict[str, Any]] = {
    "projections": {"target_modules": PROJECTIONS},
    "default targets": {"target_modules": None},
    "rslora": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True},
    "biases of adapted": {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"},
    "all biases": {"target_modules": ["k_proj", "down_proj"], "bias": "all"},
    "embedding": {"target_modules": ["embed_tokens", "v_proj"]},
    "head whole": {"target_modules": ["up_proj"], "modules_to_save": ["lm_head"]},
    "head adapted": {"target_modules": ["lm_head", "q_proj"]},
    "regular expression": {"target_modules": r".*layers\.0\..*(q|o)_proj"},
}


SHARED_OUT = ("projections", "all biases", "embedding", "head whole", "head adapted")


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("case, world, tp", [*((c, 2, 2) if c in SHARED_OUT else (c, 1, 1) for c in CASES), ("projections", 4, 2)])
def test_losses_equal_peft(nxd: Nxd, case: str, world: int, tp: int) -> None:
    peft = pytest.importorskip("peft")
    nxd(world, tp=tp)
    biases = "bias" in CASES[case]
    base = llama(layers=2 if world == 4 else 1, attention_bias=biases, mlp_bias=biases)
    model = LoraModel(parallel(base), LoraConfig(lora_rank=4, lora_alpha=8, **CASES[case]))
    config = {k: v for k, v in CASES[case].items() if v is not None}
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, **config))
    settings, tensors = peft_format.to_peft(model)
    found = peft.set_peft_model_state_dict(theirs, tensors)
    assert not found.unexpected_keys
    assert model.get_nb_trainable_parameters()[0] == sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    want = losses(theirs, 4, "cpu")
    assert want[-1] < want[0] - 0.01
    torch.testing.assert_close(losses(model, 4, "xla"), want, rtol=RTOL, atol=0)
    trained = peft_format.to_peft(model)[1]
    for name, value in peft.get_peft_model_state_dict(theirs).items():
        if name in trained:
            torch.testing.assert_close(trained[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert settings["r"] == 4


@pytest.mark.parametrize("independent", ["0", "1"])
def test_independent_dropout_differs_among_data_but_not_tensor_parallel_ranks(
    nxd: Nxd, monkeypatch: pytest.MonkeyPatch, independent: str
) -> None:
    from torch_bridge.recorder import sharded

    monkeypatch.setenv("NXD_JAX_INDEPENDENT_DRAWS", independent)
    nxd(4, tp=2)
    model = LoraModel(parallel(llama()), LoraConfig(lora_rank=4, lora_dropout=0.5, target_modules=["q_proj", "o_proj"]))
    ids = sharded.from_ranks(lambda r: torch.arange(8).reshape(1, 8), ["dp"])
    assert model(input_ids=ids).logits.shape == (1, 8, 32)
    layer = model._layers["model.layers.0.self_attn.q_proj"]
    x = sharded.from_ranks(lambda r: torch.ones(1, 4, 16), ["dp"])
    masks = sharded.shards(layer.lora_dropout(x))
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[2], masks[3]) and torch.equal(masks[0], masks[2]) == (independent == "0")
    model.eval()
    assert torch.equal(sharded.shards(layer.lora_dropout(x))[0], torch.ones(1, 4, 16))
