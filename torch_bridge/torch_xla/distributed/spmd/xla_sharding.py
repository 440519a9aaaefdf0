"""`torch_xla.distributed.spmd.xla_sharding`."""

from torch_bridge.torch_xla.distributed.spmd import (
    HybridMesh,
    Mesh,
    ShardingSpec,
    XLAShardedTensor,
    annotate_custom_sharding,
    clear_sharding,
    disable_manual_sharding,
    enable_manual_sharding,
    get_1d_mesh,
    get_global_mesh,
    mark_sharding,
    mark_sharding_with_gradients,
    set_global_mesh,
    xla_patched_nn_linear_forward,
)

__all__ = [
    "HybridMesh",
    "Mesh",
    "ShardingSpec",
    "XLAShardedTensor",
    "annotate_custom_sharding",
    "clear_sharding",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "xla_patched_nn_linear_forward",
]
