"""What tests of quantized layers share: schemes, float layers, and what must come out."""

from __future__ import annotations

from typing import Any

import torch

from nxd_jax.parallel_layers import parallel_state
from nxd_jax.quantization import quantization_config as config
from nxd_jax.quantization.quantization_layers import QuantizedColumnParallel, QuantizedRowParallel
from nxd_jax.tensor_parallel import full_weights
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from tests.nxd_jax.parallel_layers.parts import own, tp_place
from torch_bridge.mesh import world

IN, OUT = 16, 24
TENSOR, CHANNEL, BLOCKS = (
    config.get_default_custom_qconfig_dict(),
    config.get_default_per_channel_custom_qconfig_dict(),
    config.get_default_blockwise_custom_qconfig_dict(),
)
SCHEMES: dict[str, Any] = {
    "int8 tensor": TENSOR,
    "int8 channel": CHANNEL,
    "e4m3 tensor, exponents": {**TENSOR, "quantized_dtype": torch.float8_e4m3fn, "scale_dtype": config.ScaleDtype.F8E8M0},
    "e5m2 channel": {**CHANNEL, "quantized_dtype": torch.float8_e5m2},
    "blocks": {**BLOCKS, "block_axis": [0, 1], "block_size": [2, 4]},
    "blocks that ranks share": {**BLOCKS, "block_axis": [-2, -1], "block_size": [12, 8]},
    "blocks of a row, int8, exponents": {
        **BLOCKS,
        "quantized_dtype": torch.int8,
        "block_axis": [1],
        "block_size": [4],
        "scale_dtype": torch.uint8,
    },
}
LAYERS: dict[Any, Any] = {ColumnParallelLinear: QuantizedColumnParallel, RowParallelLinear: QuantizedRowParallel}


def linear(kind: Any, **kwargs: Any) -> Any:
    torch.manual_seed(3)
    return kind(IN, OUT, **kwargs).to("xla")


def full(parameter: Any) -> torch.Tensor:
    found = full_weights.gather_full(parameter)
    assert isinstance(found, torch.Tensor)
    return found


def dequantized(float_layer: Any, q_config: Any) -> torch.Tensor:
    """The whole weight of the quantized layer, by the scheme's own arithmetic (test_schemes.py has the formulas)."""
    scheme = LAYERS[type(float_layer)].from_float(float_layer, q_config)._scheme
    return scheme.dequantize(*scheme.quantize(full(float_layer.weight)), torch.float32)


def parts(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Each tensor parallel rank's part of a tensor."""
    chunks = x.chunk(parallel_state.get_tensor_model_parallel_size(), dim)
    return own([chunks[tp_place(r)] for r in range(world.size())])
