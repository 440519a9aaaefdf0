"""`convert`: which layers, copies, attributes, and mistakes; and what torch quantized, in parallel layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nxd_jax.quantization import quantization_config as config
from nxd_jax.quantization.quantization_layers import QuantizedColumnParallel, QuantizedRowParallel
from nxd_jax.quantization.quantization_mappings import DEFAULT_QUANT_MODULE_MAPPINGS, get_default_quant_module_mappings
from nxd_jax.quantization.quantization_utils import (
    convert_qint8_to_int8_state_dict,
    quantize_pytorch_model_per_channel_symmetric,
    quantize_pytorch_model_per_tensor_symmetric,
)
from nxd_jax.quantization.quantize import convert
from nxd_jax.tensor_parallel import full_weights
from nxd_jax.tensor_parallel.embedding import ParallelEmbedding
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import close

QUANTIZED = (QuantizedColumnParallel, QuantizedRowParallel)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(8, 16, bias=False, gather_output=False)
        self.down = RowParallelLinear(16, 8, bias=False, input_is_parallel=True)
        self.plain = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.plain(self.down(self.up(x).relu()))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = ParallelEmbedding(32, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = ColumnParallelLinear(8, 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        out: torch.Tensor = self.lm_head(x)
        return out


ALL = {"layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "lm_head"}


def quantized(model: nn.Module) -> set[str]:
    return {name for name, m in model.named_modules() if isinstance(m, QUANTIZED)}


CHOICES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "all": ({}, ALL),
    "a word": (dict(modules_to_not_convert=["lm_head"]), ALL - {"lm_head"}),
    "words": (dict(modules_to_not_convert=["down", "layers.1"]), {"layers.0.up", "lm_head"}),
    "patterns to leave": (dict(modules_to_not_convert=["layers.*.up"]), {"layers.0.down", "layers.1.down", "lm_head"}),
    "a name": (dict(include=["layers.1.up"]), {"layers.1.up"}),
    "a layer of the root": (dict(include="lm_head"), {"lm_head"}),
    "patterns": (dict(include=["*.down", "lm_*"]), {"layers.0.down", "layers.1.down", "lm_head"}),
    "what is within": (dict(include=["layers.0"]), {"layers.0.up", "layers.0.down"}),
    "a star": (dict(include=["*"]), ALL),
    "none": (dict(include=[]), set()),
}


@pytest.mark.parametrize("name", CHOICES)
def test_which_layers(nxd: Nxd, name: str) -> None:
    nxd(1)
    kwargs, expected = CHOICES[name]
    model = Model()
    made = convert(model, **kwargs)
    assert quantized(made) == expected and quantized(model) == set()
    assert convert(model, inplace=True, **kwargs) is model and quantized(model) == expected


def test_a_copy(nxd: Nxd) -> None:
    """What is not quantized is copied with the attributes of its parameters; layers that are quantized are not copied first."""
    nxd(2, tp=2)
    model = Model().to("xla")
    made = convert(model, modules_to_not_convert=["lm_head"])
    for name in ("embed.weight", "lm_head.weight"):
        old, new = model.get_parameter(name), made.get_parameter(name)
        assert new is not old and new.tensor_model_parallel and new.partition_dim == old.partition_dim
        assert torch.equal(new.detach().cpu(), old.detach().cpu())
    assert made.layers[0].up.weight.dtype is torch.int8 and not made.layers[0].up.weight.float().any()
    assert model.layers[0].up.weight.dtype is torch.float32
    assert made.embed.tensor_parallel_group is model.embed.tensor_parallel_group


def test_values_too(nxd: Nxd) -> None:
    nxd(2, tp=2)
    model = Model().to("xla").eval()
    tokens = torch.randint(0, 32, (2, 5), device="xla")
    expected = model(tokens).detach().cpu()
    per_channel = config.get_default_per_channel_custom_qconfig_dict()
    made = convert(model, per_channel, quantize_weights=True)
    assert not made.training and not made.lm_head.training
    found = made(tokens).detach().cpu()
    assert 0 < (found - expected).abs().max() < 0.02 * expected.abs().max()
    zeros = convert(model, per_channel)
    assert not zeros(tokens).detach().cpu().any()


def test_layers_used_twice_and_the_root(nxd: Nxd) -> None:
    nxd(1)
    model = Model()
    model.layers[1].up = model.layers[0].up
    for made in (convert(model), convert(model, inplace=True)):
        assert made.layers[1].up is made.layers[0].up and isinstance(made.layers[1].up, QuantizedColumnParallel)
    layer = ColumnParallelLinear(8, 16)
    assert type(convert(layer)) is QuantizedColumnParallel and type(convert(layer, inplace=True)) is QuantizedColumnParallel


def test_the_hook_of_a_float_layer(nxd: Nxd) -> None:
    nxd(1)
    layer = RowParallelLinear(8, 16)
    seen: list[nn.Module] = []
    layer.post_create_quantized_module_hook = seen.append
    made = convert(layer)
    assert seen == [made]


def test_mappings(nxd: Nxd) -> None:
    nxd(1)
    assert get_default_quant_module_mappings() is DEFAULT_QUANT_MODULE_MAPPINGS
    table = {kind: quantized for kind, quantized in DEFAULT_QUANT_MODULE_MAPPINGS.items() if kind is not ColumnParallelLinear}
    assert quantized(convert(Model(), mapping=table)) == {"layers.0.down", "layers.1.down"}

    class Mine(nn.Linear):
        @classmethod
        def from_float(cls, mod: nn.Linear, q_config: Any) -> nn.Module:
            return cls(mod.in_features, mod.out_features)

    made = convert(Model(), mapping={nn.Linear: Mine})
    assert isinstance(made.layers[0].plain, Mine) and quantized(made) == set()
    with pytest.raises(ValueError, match=r"quantize_weights=True: Mine.from_float takes no such argument; add it, or load"):
        convert(Model(), mapping={nn.Linear: Mine}, quantize_weights=True)


def test_mistakes(nxd: Nxd, caplog: pytest.LogCaptureFixture) -> None:
    nxd(1)
    with pytest.raises(
        AssertionError, match=r"give include or modules_to_not_convert, not both; got include=\['a'\] and modules_to_not_convert=\['b'\]"
    ):
        convert(Model(), include=["a"], modules_to_not_convert=["b"])
    assert quantized(convert(Model(), include=["layer.*"])) == set()
    assert "quantize.convert: include='layer.*' fits no module's name" in caplog.text


@pytest.mark.parametrize("per_channel", [False, True])
def test_what_torch_quantized(nxd: Nxd, per_channel: bool) -> None:
    """A torch model in qint8, its state dict in int8, in parallel layers on two ranks: what torch's model gives, but for the inputs that it quantizes."""
    nxd(2, tp=2)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).eval()
    quantize = quantize_pytorch_model_per_channel_symmetric if per_channel else quantize_pytorch_model_per_tensor_symmetric
    model = quantize(plain)
    state = model.state_dict()
    convert_qint8_to_int8_state_dict(state)
    q_config = config.get_default_per_channel_custom_qconfig_dict() if per_channel else config.get_default_custom_qconfig_dict()
    layers = (ColumnParallelLinear(8, 8, bias=False, gather_output=False), RowParallelLinear(8, 8, bias=False, input_is_parallel=True))
    parallel = convert(nn.Sequential(*layers), q_config, inplace=True)
    assert set(parallel.state_dict()) == set(state)
    for name, parameter in parallel.named_parameters():
        full_weights.scatter_full(parameter, state[name])
    x = torch.randn(2, 3, 8)
    weights = [state[f"{k}.weight"] * state[f"{k}.scale"] for k in (0, 1)]
    found = parallel(x.to("xla"))
    close(found, x @ weights[0].T @ weights[1].T)
    torch.testing.assert_close(found.detach().cpu(), model(x).detach(), atol=1e-2, rtol=1e-2)
