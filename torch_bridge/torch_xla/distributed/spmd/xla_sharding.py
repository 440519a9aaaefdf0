"""`torch_xla.distributed.spmd.xla_sharding`."""

from torch_bridge.torch_xla.distributed.spmd import (
    HybridMesh,
    Mesh,
    ShardingSpec,
    clear_sharding,
    get_global_mesh,
    mark_sharding,
    set_global_mesh,
)

__all__ = ["HybridMesh", "Mesh", "ShardingSpec", "clear_sharding", "get_global_mesh", "mark_sharding", "set_global_mesh"]
