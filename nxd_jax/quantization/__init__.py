"""`neuronx_distributed.quantization`: weights in int8 and float8, for inference.

Modules of NxD: `quantize` (a model with quantized layers), `quantization_layers`, `quantization_mappings`, `quantization_config`, `quantization_utils`
(tensors and torch models on the CPU), `observer`, `dequantize`, `microscaling`. Besides: `schemes` (scales of a weight), `rescale` (OCP's float8 in
Neuron's range), and what `quantization_layers` consists of.
"""

from nxd_jax.quantization.quantization_config import (
    ActivationQuantizationType,
    KVQuantizationConfig,
    QuantizationType,
    QuantizedDtype,
    ScaleDtype,
    get_default_blockwise_custom_qconfig_dict,
    get_default_custom_qconfig_dict,
    get_default_expert_wise_per_channel_custom_qconfig_dict,
    get_default_per_channel_custom_qconfig_dict,
)
from nxd_jax.quantization.quantization_layers import (
    QuantizedColumnParallel,
    QuantizedExpertFusedColumnParallel,
    QuantizedExpertFusedRowParallel,
    QuantizedRowParallel,
)
from nxd_jax.quantization.quantize import convert
from nxd_jax.quantization.rescale import rescale_state_dict

__all__ = [
    "ActivationQuantizationType",
    "KVQuantizationConfig",
    "QuantizationType",
    "QuantizedColumnParallel",
    "QuantizedDtype",
    "QuantizedExpertFusedColumnParallel",
    "QuantizedExpertFusedRowParallel",
    "QuantizedRowParallel",
    "ScaleDtype",
    "convert",
    "get_default_blockwise_custom_qconfig_dict",
    "get_default_custom_qconfig_dict",
    "get_default_expert_wise_per_channel_custom_qconfig_dict",
    "get_default_per_channel_custom_qconfig_dict",
    "rescale_state_dict",
]
