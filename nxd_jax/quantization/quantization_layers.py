"""`neuronx_distributed.quantization.quantization_layers`: parallel layers with quantized weights.

`base` has what they have in common, `products` the product, `scale_parts` how ranks share out scales, `state_dict_adaptor` their names in state dicts.
"""

from nxd_jax.quantization.base import BaseQuantizeParallelLinear
from nxd_jax.quantization.experts import QuantizedExpertFusedColumnParallel, QuantizedExpertFusedRowParallel
from nxd_jax.quantization.linear import QuantizedColumnParallel, QuantizedRowParallel
from nxd_jax.quantization.quantization_config import ActivationQuantizationType, QuantizationType, QuantizedDtype, ScaleDtype
from nxd_jax.quantization.state_dict_adaptor import QuantizedParallelLinearLayerStateDictAdaptor

__all__ = [
    "ActivationQuantizationType",
    "BaseQuantizeParallelLinear",
    "QuantizationType",
    "QuantizedColumnParallel",
    "QuantizedDtype",
    "QuantizedExpertFusedColumnParallel",
    "QuantizedExpertFusedRowParallel",
    "QuantizedParallelLinearLayerStateDictAdaptor",
    "QuantizedRowParallel",
    "ScaleDtype",
]
