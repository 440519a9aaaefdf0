"""Adapters of transformers' `Conv1D`, a linear layer whose weight is [in, out]: GPT-2's default target."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from nxd_jax.modules.lora import LoraConfig, LoraLinear, LoraModel, peft_format
from tests.nxd_jax.lora.models import logits, stir

R, ALPHA = 2, 6


def layer() -> tuple[LoraModel, LoraLinear]:
    """A layer of 4 inputs and 6 outputs, with an adapter that is not zero."""
    torch.manual_seed(0)
    model = LoraModel(nn.Sequential(Conv1D(6, 4)), LoraConfig(lora_rank=R, lora_alpha=ALPHA, target_modules=["0"]))
    stir(model)
    found = model._layers["0"]
    assert isinstance(found, LoraLinear)
    return model, found


def gpt2(device: str = "cpu") -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, attn_implementation="eager",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).to(device)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_results_gradients_and_merging(device: str) -> None:
    model, adapted = layer()
    a, b = (m.weight.detach().clone().requires_grad_() for m in (adapted.lora_A, adapted.lora_B))
    weight, bias = (adapted.base_layer._parameters[n].detach().clone() for n in ("weight", "bias"))
    assert (a.shape, b.shape, weight.shape) == ((R, 4), (6, R), (4, 6))
    assert (adapted.in_features, adapted.out_features, adapted.is_conv_1d_layer) == (4, 6, True)
    x = torch.randn(3, 5, 4)
    want = x @ (weight + ALPHA / R * (b @ a).t()) + bias
    want.square().sum().backward()

    model = model.to(device)
    out = model(x.to(device))
    out.square().sum().backward()
    torch.testing.assert_close(out.detach().cpu(), want.detach(), rtol=1e-4, atol=1e-5)
    for own, dense in ((adapted.lora_A.weight, a), (adapted.lora_B.weight, b)):
        assert dense.grad is not None
        torch.testing.assert_close(own.grad.cpu(), dense.grad, rtol=1e-4, atol=1e-4)
    assert adapted.base_layer.weight.grad is None
    delta = adapted.get_delta_weight().detach().cpu()
    torch.testing.assert_close(delta, (ALPHA / R * (b @ a).t()).detach(), rtol=1e-5, atol=1e-6)
    model.merge_lora()
    torch.testing.assert_close(adapted.base_layer(x.to(device)).detach().cpu(), want.detach(), rtol=1e-4, atol=1e-5)
    model.unmerge_lora()
    assert torch.equal(adapted.base_layer.weight.detach().cpu(), weight)


def test_merged_state_and_unloaded_model() -> None:
    model, _ = layer()
    x = torch.randn(3, 4)
    want = model(x).detach()
    model.lora_config.save_lora_base = model.lora_config.merge_lora = True
    plain = nn.Sequential(Conv1D(6, 4))
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain(x).detach(), want)
    unloaded: Any = model.merge_and_unload()
    assert type(unloaded[0]) is Conv1D
    torch.testing.assert_close(unloaded(x).detach(), want)


def test_other_layers_with_such_a_weight() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    config = LoraConfig(lora_rank=R, lora_alpha=ALPHA)
    own = LoraLinear(Own(), config, is_conv_1d_layer=True)
    with torch.no_grad():
        own.lora_B.weight.normal_()
    x = torch.randn(3, 4)
    want = own(x).detach()
    own.merge(safe_merge=True)
    torch.testing.assert_close(own.base_layer(x).detach(), want, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"is_conv_1d_layer=True is for layers with a weight \[in, out\], a Linear has \[out, in\]"):
        LoraLinear(nn.Linear(4, 6), config, is_conv_1d_layer=True)
    with pytest.raises(ValueError, match="a Conv1d, which LoRA cannot adapt. It adapts Linear, .*, transformers' Conv1D"):
        LoraModel(nn.Sequential(nn.Conv1d(2, 2, 1)), LoraConfig(target_modules=["0"]))


def test_gpt2_with_its_usual_targets_on_xla() -> None:
    """Losses in training are those of the same model on the CPU; at first those without adapters."""
    from tests.nxd_jax.lora.models import batch, losses

    plain = gpt2()(input_ids=batch(), labels=batch()).loss.item()
    found = []
    for device in ("cpu", "xla"):
        model = LoraModel(gpt2(device), LoraConfig(lora_rank=R))
        assert list(model._layers) == ["transformer.h.0.attn.c_attn"]
        found.append(losses(model, 3, device, lr=0.1))
    assert found[0][0] == pytest.approx(plain) and found[0][-1] < plain
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=0)


def test_peft_files(tmp_path: pathlib.Path) -> None:
    """PEFT loads ours and we load PEFT's, with the same results."""
    peft = pytest.importorskip("peft")
    targets = ["c_attn", "c_fc", "attn.c_proj"]
    model = LoraModel(gpt2(), LoraConfig(lora_rank=R, lora_alpha=ALPHA, target_modules=targets))
    stir(model)
    assert peft_format.to_peft(model)[0]["fan_in_fan_out"] is True
    peft_format.save_pretrained(model, tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(gpt2(), tmp_path / "ours")
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.mul_(0.5)
    theirs.save_pretrained(tmp_path / "theirs")
    again = LoraModel(gpt2(), LoraConfig(load_lora_from_ckpt=True, lora_save_dir=str(tmp_path / "theirs")))
    assert sorted(again._layers) == sorted(model._layers)
    torch.testing.assert_close(logits(again), logits(theirs), rtol=1e-4, atol=1e-5)
