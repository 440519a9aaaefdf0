"""Adapters beside quantized weights."""

from __future__ import annotations

import pytest
import torch

from nxd_jax.modules.lora import LoraConfig, LoraModel
from nxd_jax.quantization import quantization_config as config
from nxd_jax.quantization.quantize import convert
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import close
from tests.nxd_jax.quantization.test_convert import Block


def test_adapters_are_trained_and_not_merged(nxd: Nxd) -> None:
    nxd(2, tp=2)
    torch.manual_seed(0)
    model = convert(Block().to("xla"), config.get_default_per_channel_custom_qconfig_dict(), quantize_weights=True)
    x = torch.randn(3, 8, device="xla")
    expected = model(x).detach().cpu()
    options = dict(lora_rank=2, lora_alpha=4, lora_dropout=0.0, bias="none", target_modules=["up", "down"])
    adapted = LoraModel(model, LoraConfig(enable_lora=True, **options))
    close(adapted(x), expected)
    adapted(x).square().sum().backward()
    trained = {name: p for name, p in adapted.named_parameters() if p.grad is not None and bool(p.grad.detach().cpu().any())}
    assert {name.rpartition("module.")[2] for name in trained} == {"up.lora_B.weight", "down.lora_B.weight"}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    with pytest.raises(
        NotImplementedError, match="the weight is quantized to torch.int8.*keep the adapter beside it, or merge before quantize.convert"
    ):
        adapted.merge_and_unload()
