"""Quantized models that are traced for inference: what torch quantized, cut for ranks, compiled, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from neuronx_distributed import ModelBuilder, NxDModel, NxDParallelState, shard_checkpoint
from torch import nn

from nxd_jax.quantization import quantization_config as config
from nxd_jax.quantization import quantization_utils as utils
from nxd_jax.quantization.quantize import convert
from nxd_jax.quantization.schemes import rounded
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

PER_CHANNEL: Any = config.get_default_per_channel_custom_qconfig_dict()
STATIC: Any = {**config.get_default_custom_qconfig_dict(), "quantized_dtype": torch.float8_e4m3fn, "activation_quantization_type": "static"}


class MLP(nn.Module):
    def __init__(self, parallel: bool):
        super().__init__()
        torch.manual_seed(0)
        if parallel:
            self.up: nn.Module = ColumnParallelLinear(8, 16, gather_output=False, bias=False)
            self.down: nn.Module = RowParallelLinear(16, 8, input_is_parallel=True)
        else:
            self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x))
        return out


def checkpoint(kind: str) -> dict[str, Any]:
    """What torch's quantized model has; of qint8 as it is ("packed") or in the names of parallel layers."""
    plain = MLP(parallel=False)
    if kind == "static float8":
        state = utils.quantize_pytorch_model_per_tensor_symmetric(plain, dtype=torch.float8_e4m3fn).state_dict()
        return {**state, "up.input_scale": torch.tensor([0.02]), "down.input_scale": torch.tensor([0.01])}
    return dict(utils.quantize_pytorch_model_per_channel_symmetric(plain).state_dict())


def by_hand(state: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    utils.convert_qint8_to_int8_state_dict(state)
    for name in ("up", "down"):
        scale = state.get(f"{name}.input_scale")
        x = x if scale is None else rounded(x / scale, torch.float8_e4m3fn).float() * scale
        x = x @ (state[f"{name}.weight"].float() * state[f"{name}.scale"]).T
    out: torch.Tensor = x + state["down.bias"]
    return out


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("kind", ["packed", "static float8"])
def test_on_two_ranks(tmp_path: Path, kind: str) -> None:
    x = torch.randn(2, 8)
    with NxDParallelState(world_size=2, tensor_model_parallel_size=2):
        model = convert(MLP(parallel=True), PER_CHANNEL if kind == "packed" else STATIC, inplace=True).eval()
        built = ModelBuilder(model).trace(args=x).compile()
        parts = shard_checkpoint(checkpoint(kind), model)
    assert [p["up.weight"].shape for p in parts] == [(8, 8)] * 2 and parts[1]["up.scale"].shape == ((8, 1) if kind == "packed" else (1,))
    built.set_weights(parts)
    built.to_neuron()
    y = built(x)
    torch.testing.assert_close(y, by_hand(checkpoint(kind), x), atol=1e-5, rtol=1e-5)
    built.save(str(tmp_path / "model.pt"), save_weights=True)
    loaded = NxDModel.load(str(tmp_path / "model.pt"))
    loaded.to_neuron()
    assert torch.equal(loaded(x), y)
