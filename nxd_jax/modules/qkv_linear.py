"""`neuronx_distributed.modules.qkv_linear`: the Q, K and V projections of grouped-query attention, for more ranks than there are K/V heads."""

from nxd_jax.tensor_parallel.qkv_linear import GQAQKVColumnParallelLinear, gqa_qkv_linear_with_async_allreduce

__all__ = [
    "GQAQKVColumnParallelLinear",
    "gqa_qkv_linear_with_async_allreduce",
]
