"""Adapters beside quantized weights."""

from __future__ import annotations

import pytest
import torch

from nxd_jax.modules.lora import LoraConfig, LoraModel
from nxd_jax.parallel_layers.layers import ColumnParallelLinear
from nxd_jax.quantization import quantization_config as config
from nxd_jax.quantization.quantize import convert
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.lora.models import full, stir
from tests.nxd_jax.parallel_layers.parts import close, per_rank
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


@pytest.mark.parametrize("quantize_weights", [True, False])
def test_adapters_of_a_model_that_is_quantized_stay(nxd: Nxd, quantize_weights: bool) -> None:
    nxd(2, tp=2)
    torch.manual_seed(0)
    adapted = LoraModel(Block().to("xla"), LoraConfig(lora_rank=2, target_modules=["up", "down"]))
    stir(adapted)
    trained = {name: full(p) for name, p in adapted.named_parameters() if p.requires_grad}
    model = convert(adapted, quantize_weights=quantize_weights)
    kinds = {name: type(m).__name__ for name, m in model.named_modules() if type(m).__name__.startswith("Quantized")}
    assert kinds == {"module.up.base_layer": "QuantizedColumnParallel", "module.down.base_layer": "QuantizedRowParallel"}
    found = {name: full(p) for name, p in model.named_parameters() if p.requires_grad}
    assert list(found) == list(trained) and all(torch.equal(found[name], t) for name, t in trained.items())
    adapted.merge_lora()
    with pytest.raises(
        ValueError, match=r"adapters are merged for now, .*: call merge_and_unload\(\), which merges for good, or unmerge_lora\(\)"
    ):
        convert(adapted)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("dtype", [config.QuantizedDtype.INT8, config.QuantizedDtype.F8E4M3])
def test_gradients_pass_quantized_inputs(nxd: Nxd, dtype: config.QuantizedDtype, kind: str) -> None:
    """Those of what is not clipped, however small, as through the dequantized weights."""
    nxd(2, tp=2)
    torch.manual_seed(0)
    quantized = config.get_default_custom_qconfig_dict() | {
        "quantized_dtype": dtype,
        "activation_quantization_type": kind,
        "clamp_bound": 9.0,
    }
    layer = convert(ColumnParallelLinear(8, 6, bias=False).to("xla"), quantized, quantize_weights=True)
    if kind == "static":
        with torch.no_grad():
            layer.input_scale.fill_(1 / 64)
    x = torch.randn(3, 8).clamp(-1.5, 1.5)
    x[0, 0] = 2000.0
    grad, own = torch.randn(3, 6) * 1e-5, x.to("xla").requires_grad_()
    found = layer(own)
    close(found, layer(own.detach()).cpu())
    found.backward(grad.to("xla"))
    expected = grad @ torch.cat(per_rank(layer.dequantized_weight()))
    expected[0, 0] = 0
    close(own.grad, expected, rtol=1e-4, atol=1e-10)
