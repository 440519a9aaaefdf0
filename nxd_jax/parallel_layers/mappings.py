"""`neuronx_distributed.parallel_layers.mappings`: the regions of `tensor_parallel.regions`. NxD's model code calls the moves with an underscore, too."""

from nxd_jax.tensor_parallel import regions
from nxd_jax.tensor_parallel.partition import split_tensor_along_dim, split_tensor_along_last_dim
from nxd_jax.tensor_parallel.regions import (
    copy_to_tensor_model_parallel_region,
    enter_expert_parallel_region,
    exit_expert_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region_with_dim,
    reduce_from_context_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region_tiled,
    reduce_scatter_to_tensor_model_parallel_region_with_dim,
    round_robin_scatter_to_process_group_spmd,
    scatter_input_channels_to_tensor_model_parallel_region,
    scatter_to_process_group_spmd,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)

_gather_along_dim = regions.gather_along_dim
_gather_along_first_dim = regions.gather_along_first_dim
_gather_along_last_dim = regions.gather_along_last_dim
_reduce = regions.reduce
_reduce_scatter_along_dim = regions.reduce_scatter_along_dim
_reduce_scatter_along_first_dim = regions.reduce_scatter_along_first_dim
_reduce_scatter_along_last_dim = regions.reduce_scatter_along_last_dim
_split_along_dim = regions.split_along_dim
_split_along_first_dim = regions.split_along_first_dim
_split_along_last_dim = regions.split_along_last_dim

__all__ = [
    "_gather_along_dim",
    "_gather_along_first_dim",
    "_gather_along_last_dim",
    "_reduce",
    "_reduce_scatter_along_dim",
    "_reduce_scatter_along_first_dim",
    "_reduce_scatter_along_last_dim",
    "_split_along_dim",
    "_split_along_first_dim",
    "_split_along_last_dim",
    "copy_to_tensor_model_parallel_region",
    "enter_expert_parallel_region",
    "exit_expert_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region_with_dim",
    "reduce_from_context_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "reduce_scatter_to_sequence_parallel_region_tiled",
    "reduce_scatter_to_tensor_model_parallel_region_with_dim",
    "round_robin_scatter_to_process_group_spmd",
    "scatter_input_channels_to_tensor_model_parallel_region",
    "scatter_to_process_group_spmd",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "split_tensor_along_dim",
    "split_tensor_along_last_dim",
]
