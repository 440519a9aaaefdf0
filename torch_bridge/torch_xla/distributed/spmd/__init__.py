"""`torch_xla.distributed.spmd`, known as `xs`: sharding annotations for programs over all devices (`xr.use_spmd`)."""

from torch_bridge.torch_xla.distributed.spmd import api, debugging, meshes, xla_sharded_tensor, xla_sharding
from torch_bridge.torch_xla.distributed.spmd.api import auto_policy, xla_distribute_module, xla_distribute_tensor
from torch_bridge.torch_xla.distributed.spmd.meshes import (
    HybridMesh,
    Mesh,
    ShardingError,
    ShardingType,
    get_1d_mesh,
    get_global_mesh,
    set_global_mesh,
)
from torch_bridge.torch_xla.distributed.spmd.xla_sharded_tensor import XLAShard, XLAShardedTensor
from torch_bridge.torch_xla.distributed.spmd.xla_sharding import (
    ShardingSpec,
    XLAPatchedLinear,
    _mark_manual_sharding,
    annotate_custom_sharding,
    apply_backward_optimization_barrier,
    clear_sharding,
    disable_manual_sharding,
    enable_manual_sharding,
    mark_sharding,
    mark_sharding_with_gradients,
    wrap_as_sharded_tensor,
    wrap_if_sharded,
    xla_patched_nn_linear_forward,
)

__all__ = [
    "HybridMesh",
    "Mesh",
    "ShardingError",
    "ShardingSpec",
    "ShardingType",
    "XLAPatchedLinear",
    "XLAShard",
    "XLAShardedTensor",
    "_mark_manual_sharding",
    "annotate_custom_sharding",
    "api",
    "apply_backward_optimization_barrier",
    "auto_policy",
    "clear_sharding",
    "debugging",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "meshes",
    "set_global_mesh",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
    "xla_distribute_module",
    "xla_distribute_tensor",
    "xla_patched_nn_linear_forward",
    "xla_sharded_tensor",
    "xla_sharding",
]
