"""Clear errors from torch's own DTensor, `fully_shard` and the like on a `DeviceMesh` of xla devices, which torch makes without process groups."""

from __future__ import annotations

from typing import NoReturn

from torch.distributed.device_mesh import DeviceMesh

_OF_GROUPS = frozenset({"_coordinate_on_dim", "_dim_group_names", "_dim_group_infos"})


def install() -> None:
    """Have a mesh of xla devices say what it cannot do, where torch would raise an error about its own insides."""
    if "__getattr__" not in vars(DeviceMesh):
        DeviceMesh.__getattr__ = _missing  # type: ignore[attr-defined]


def _missing(self: DeviceMesh, name: str) -> NoReturn:
    if name in _OF_GROUPS and vars(self).get("_device_type", vars(self).get("device_type")) == "xla":
        raise NotImplementedError(
            "torch.distributed.tensor (DTensor, distribute_tensor, parallelize_module) and fully_shard on a DeviceMesh of xla devices are not there yet. For "
            "tensor parallelism use neuronx_distributed's parallel layers, for sharded optimizer state its ZeRO-1; data parallelism needs no mesh."
        )
    raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
