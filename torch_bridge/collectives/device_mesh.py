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
            "DTensors of this rank's own part (DTensor.from_local, parallelize_module, fully_shard) need process groups, which a DeviceMesh of xla devices "
            "lacks. distribute_tensor and distribute_module work there: they annotate tensors of their global shape (torch_xla.distributed.spmd). "
            "Among ranks use neuronx_distributed's parallel layers for tensor parallelism, and XlaFullyShardedDataParallel to shard parameters."
        )
    raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
