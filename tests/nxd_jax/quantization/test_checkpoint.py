"""Checkpoints of quantized models, which any layout of ranks loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import neuronx_distributed
import pytest
import torch

from nxd_jax.quantization import quantization_config as config
from nxd_jax.quantization.quantize import convert
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.quantization.test_convert import Model

SCHEMES: dict[str, Any] = {
    "int8": config.get_default_per_channel_custom_qconfig_dict(),
    "float8": {**config.get_default_blockwise_custom_qconfig_dict(), "block_axis": [0, 1], "block_size": [4, 4]},
}


@pytest.mark.parametrize("name", SCHEMES)
def test_another_number_of_ranks(nxd: Nxd, tmp_path: Path, name: str) -> None:
    nxd(4, tp=2)
    tokens = torch.randint(0, 32, (2, 5))
    model = convert(Model().to("xla"), SCHEMES[name], quantize_weights=True).eval()
    expected = model(tokens.to("xla")).detach().cpu()
    neuronx_distributed.save_checkpoint(tmp_path, "t", model)

    nxd(4, tp=4)
    other = convert(Model().to("xla"), SCHEMES[name], inplace=True).eval()
    assert not other(tokens.to("xla")).detach().cpu().any()
    neuronx_distributed.load_checkpoint(tmp_path, "t", other)
    weight = other.layers[0].up.weight
    assert weight.dtype is (torch.int8 if name == "int8" else torch.float8_e4m3fn) and weight.shape == (4, 8)
    torch.testing.assert_close(other(tokens.to("xla")).detach().cpu(), expected, atol=1e-5, rtol=1e-5)
