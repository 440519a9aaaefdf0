"""`neuronx_distributed.parallel_layers.pad`: make the number of attention heads divide by the tensor-parallel size by adding heads of zeros."""

from nxd_jax.tensor_parallel.head_padding import generate_padding_mask, get_number_of_extra_heads, pad_model

__all__ = [
    "generate_padding_mask",
    "get_number_of_extra_heads",
    "pad_model",
]
