"""`torch_xla.distributed.spmd`, known as `xs`: names that libraries import; using them raises NotImplementedError."""

from __future__ import annotations

from typing import Any, NoReturn

ADVICE = (
    "GSPMD annotations (mark_sharding, DTensor, FSDP through SPMD) are not there yet. For tensor parallelism use neuronx_distributed's parallel layers, for "
    "sharded optimizer state its ZeRO-1; data parallelism needs no annotation."
)


def _later(name: str) -> NoReturn:
    raise NotImplementedError(f"torch_xla.distributed.spmd.{name}: {ADVICE}")


class Mesh:
    """`xs.Mesh`."""

    def __init__(self, *args: object, **kwargs: object):
        _later("Mesh")


class HybridMesh(Mesh):
    """`xs.HybridMesh`."""


class ShardingSpec:
    """`xs.ShardingSpec`."""

    def __init__(self, *args: object, **kwargs: object):
        _later("ShardingSpec")


class XLAShardedTensor:
    """`xs.XLAShardedTensor`: no tensor is one."""

    def __init__(self, *args: object, **kwargs: object):
        _later("XLAShardedTensor")


def mark_sharding(*args: object, **kwargs: object) -> Any:
    """`xs.mark_sharding`."""
    _later("mark_sharding")


def clear_sharding(t: Any) -> Any:
    """`xs.clear_sharding`."""
    _later("clear_sharding")


def set_global_mesh(mesh: Any) -> None:
    """`xs.set_global_mesh`."""
    _later("set_global_mesh")


def get_global_mesh() -> None:
    """`xs.get_global_mesh`: None, as no mesh can have been set."""


def get_1d_mesh(*args: object, **kwargs: object) -> Any:
    """`xs.get_1d_mesh`."""
    _later("get_1d_mesh")


def mark_sharding_with_gradients(*args: object, **kwargs: object) -> Any:
    """`xs.mark_sharding_with_gradients`."""
    _later("mark_sharding_with_gradients")


def annotate_custom_sharding(*args: object, **kwargs: object) -> Any:
    """`xs.annotate_custom_sharding`."""
    _later("annotate_custom_sharding")


def enable_manual_sharding(*args: object, **kwargs: object) -> Any:
    """`xs.enable_manual_sharding`."""
    _later("enable_manual_sharding")


def disable_manual_sharding(*args: object, **kwargs: object) -> Any:
    """`xs.disable_manual_sharding`."""
    _later("disable_manual_sharding")


def xla_patched_nn_linear_forward(m: Any, input: Any, einsum_str: str | None = None) -> Any:
    """`xs.xla_patched_nn_linear_forward`: an `nn.Linear`'s forward, for `apply_xla_patch_to_nn_linear`. `einsum_str`, which keeps shardings, is not needed."""
    from torch_bridge.torch_xla.distributed.fsdp.utils import XLAPatchedLinear

    return XLAPatchedLinear.apply(input, m.weight, m.bias)


def xla_distribute_tensor(*args: object, **kwargs: object) -> Any:
    """`xs.xla_distribute_tensor`."""
    _later("xla_distribute_tensor")


def xla_distribute_module(*args: object, **kwargs: object) -> Any:
    """`xs.xla_distribute_module`."""
    _later("xla_distribute_module")
