"""`neuronx_distributed.parallel_layers.layers`: linear, embedding and convolution layers whose weights tensor parallel ranks share out."""

from nxd_jax.parallel_layers.parallel_state import (
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_size,
)
from nxd_jax.parallel_layers.utils import param_is_not_tensor_parallel_duplicate
from nxd_jax.tensor_parallel.base_layer import BaseParallelLayer, BaseParallelLinear
from nxd_jax.tensor_parallel.conv import (
    BaseParallelConv,
    InputChannelParallelConv2d,
    OutputChannelParallelConv2d,
    conv2d_with_weight_grad_allreduce,
)
from nxd_jax.tensor_parallel.conv import as_tuple2 as _as_tuple2
from nxd_jax.tensor_parallel.embedding import ParallelEmbedding
from nxd_jax.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    _initialize_affine_weight_neuron,
    _initialize_parameter_cpu,
    create_local_weight,
)
from nxd_jax.tensor_parallel.matmul import LinearWithAsyncCommunication, linear_with_async_allreduce
from nxd_jax.tensor_parallel.partition import divide, get_padding_length, set_tensor_model_parallel_attributes
from nxd_jax.tensor_parallel.spmd_rank import SPMDRank

CONV_KERNEL_OUTPUT_CHANNEL_DIMENSION = 0
CONV_KERNEL_INPUT_CHANNEL_DIMENSION = 1
"""`partition_dim` of the two convolutions."""

__all__ = [
    "CONV_KERNEL_INPUT_CHANNEL_DIMENSION",
    "CONV_KERNEL_OUTPUT_CHANNEL_DIMENSION",
    "BaseParallelConv",
    "BaseParallelLayer",
    "BaseParallelLinear",
    "ColumnParallelLinear",
    "InputChannelParallelConv2d",
    "LinearWithAsyncCommunication",
    "OutputChannelParallelConv2d",
    "ParallelEmbedding",
    "RowParallelLinear",
    "SPMDRank",
    "_as_tuple2",
    "_initialize_affine_weight_neuron",
    "_initialize_parameter_cpu",
    "conv2d_with_weight_grad_allreduce",
    "create_local_weight",
    "divide",
    "get_padding_length",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_size",
    "linear_with_async_allreduce",
    "param_is_not_tensor_parallel_duplicate",
    "set_tensor_model_parallel_attributes",
]
