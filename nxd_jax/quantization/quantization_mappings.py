"""`neuronx_distributed.quantization.quantization_mappings`: which quantized layer takes the place of which."""

from __future__ import annotations

from typing import Any

from torch import nn

from nxd_jax.modules.moe.moe_parallel_layers import ExpertFusedColumnParallelLinear, ExpertFusedRowParallelLinear
from nxd_jax.quantization.experts import QuantizedExpertFusedColumnParallel, QuantizedExpertFusedRowParallel
from nxd_jax.quantization.linear import QuantizedColumnParallel, QuantizedRowParallel
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

DEFAULT_QUANT_MODULE_MAPPINGS: dict[type[nn.Module], Any] = {
    ColumnParallelLinear: QuantizedColumnParallel,
    RowParallelLinear: QuantizedRowParallel,
    ExpertFusedColumnParallelLinear: QuantizedExpertFusedColumnParallel,
    ExpertFusedRowParallelLinear: QuantizedExpertFusedRowParallel,
}


def get_default_quant_module_mappings() -> dict[type[nn.Module], Any]:
    """`DEFAULT_QUANT_MODULE_MAPPINGS` itself, as in NxD: what is added to it holds for every `convert` after that."""
    return DEFAULT_QUANT_MODULE_MAPPINGS
