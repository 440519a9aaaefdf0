"""`torch_xla.experimental.pjrt` (removed upstream): older names of `torch_xla.runtime`."""

from torch_bridge.torch_xla.runtime import (
    addressable_device_count,
    device_type,
    global_ordinal,
    host_index,
    local_device_count,
    local_ordinal,
    local_process_count,
    process_count,
    process_index,
    set_device_type,
    using_pjrt,
    world_size,
    xla_device,
)
from torch_bridge.torch_xla.runtime import (
    global_runtime_device_count as global_device_count,  # when it had this name, scripts made meshes of so many devices
)

__all__ = [
    "addressable_device_count",
    "device_type",
    "global_device_count",
    "global_ordinal",
    "host_index",
    "local_device_count",
    "local_ordinal",
    "local_process_count",
    "process_count",
    "process_index",
    "set_device_type",
    "using_pjrt",
    "world_size",
    "xla_device",
]
