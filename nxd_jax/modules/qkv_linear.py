"""`neuronx_distributed.modules.qkv_linear`: the Q, K and V projections of grouped-query attention, for more ranks than there are K/V heads."""

from nxd_jax.tensor_parallel.kv_groups import shared as get_kv_shared_group
from nxd_jax.tensor_parallel.qkv_linear import GQAQKVColumnParallelLinear, gqa_qkv_linear_with_async_allreduce
from nxd_jax.tensor_parallel.regions import gather_from_tensor_model_parallel_region

__all__ = [
    "GQAQKVColumnParallelLinear",
    "gather_from_tensor_model_parallel_region",
    "get_kv_shared_group",
    "gqa_qkv_linear_with_async_allreduce",
]
