"""`torch_xla.experimental.spmd_fully_sharded_data_parallel`: FSDPv2, fully sharded data parallelism by annotations."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from torch_bridge.torch_xla.distributed.spmd import meshes, xla_sharding
from torch_bridge.torch_xla.distributed.spmd.meshes import Mesh, ShardingError
from torch_bridge.torch_xla.distributed.spmd.xla_sharded_tensor import lies, unwrap

__all__ = ["SpmdFullyShardedDataParallel"]

logger = logging.getLogger("nxd_jax")


class SpmdFullyShardedDataParallel(nn.Module):
    """`SpmdFullyShardedDataParallel` (FSDPv2): the module's parameters are divided over the mesh axis "fsdp", along their largest dim that its devices divide,
    and XLA gathers them where they are needed. Optimizer state made afterwards is divided as its parameter is.

    mesh: has an axis "fsdp"; None: the global mesh. shard_output(output, mesh): annotates the output; None: it is divided along dim 0, if it is a tensor or a
    tuple that begins with one; for modules that a policy wraps, too. auto_wrap_policy(module=, recurse=, nonwrapped_numel=), auto_wrapper_callable:
    submodules to wrap, too, as in `torch_xla.distributed.fsdp`. extra_data_axis: a mesh axis over which the batch, and so the output, is divided, too. Divide
    the inputs yourself (`MpDeviceLoader(input_sharding=...)`). Raises RuntimeError without `xr.use_spmd`, ValueError without a mesh that has the axis, or for
    an output of another type.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        mesh: Mesh | None = None,
        shard_output: Callable[[Any, Mesh], None] | None = None,
        auto_wrap_policy: Callable[..., bool] | None = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        extra_data_axis: str | None = None,
        **options: object,
    ):
        super().__init__()
        meshes.require_on()
        if isinstance(module, SpmdFullyShardedDataParallel):
            raise RuntimeError("the module is wrapped already")
        if options:
            raise TypeError(f"SpmdFullyShardedDataParallel: unknown options {', '.join(sorted(options))}")
        mesh = mesh if mesh is not None else meshes.get_global_mesh()
        if mesh is None:
            raise ShardingError("SpmdFullyShardedDataParallel: give a mesh with an axis 'fsdp' (mesh=...), or set one (xs.set_global_mesh)")
        for axis in ("fsdp", *([extra_data_axis] if extra_data_axis else [])):
            if mesh.get_axis_name_idx(axis) is None:
                raise ShardingError(
                    f"SpmdFullyShardedDataParallel: The provided {axis} axis is not in the mesh. It has {dict(mesh.shape())}"
                )
        self._mesh, self._axis = mesh, extra_data_axis
        self._shard_output = shard_output
        if auto_wrap_policy is not None:
            options = {"mesh": mesh, "shard_output": shard_output, "extra_data_axis": extra_data_axis}
            _wrap_inside(module, auto_wrap_policy, auto_wrapper_callable or type(self), **options)
        self._orig_module = module.to("xla")
        left = [(name, p) for name, p in module.named_parameters() if lies(p) is None or lies(p).spec == ()]  # type: ignore[union-attr]
        for _, parameter in left:
            xla_sharding.mark_sharding(parameter, mesh, _spec(parameter, mesh))
        _say_what_stays_whole(left, mesh)

    @property
    def module(self) -> nn.Module:
        """The module itself."""
        return self._orig_module

    def forward(self, *args: object, **kwargs: object) -> Any:
        output = self._orig_module(*args, **kwargs)
        if self._shard_output is not None:
            self._shard_output(output, self._mesh)
            return output
        first = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(first, torch.Tensor):
            raise RuntimeError(
                f"SpmdFullyShardedDataParallel: the module gives a {type(output).__name__}. Say how its tensors are divided: "
                "shard_output=lambda output, mesh: xs.mark_sharding(output.logits, mesh, ('fsdp', None, None))"
            )
        if first.dim():
            axes = ("fsdp",) if self._axis is None else (self._axis, "fsdp")
            xla_sharding.mark_sharding(unwrap(first), self._mesh, (axes, *[None] * (first.dim() - 1)))
        return output

    def __getattr__(self, name: str) -> Any:
        """What the wrapper does not have is the module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_orig_module":
                raise
            return getattr(self._orig_module, name)

    def __getitem__(self, key: Any) -> Any:
        """For a wrapped `nn.Sequential`."""
        return self._orig_module[key]  # type: ignore[index]


def _spec(parameter: torch.Tensor, mesh: Mesh) -> tuple[str | None, ...]:
    """The largest dim that the devices of "fsdp" divide, over them; none if there is none."""
    count = mesh.shape()["fsdp"]
    dims = [d for d, n in enumerate(parameter.shape) if n % count == 0]
    chosen = max(dims, key=lambda d: parameter.shape[d], default=None) if math.prod(parameter.shape) else None
    return tuple("fsdp" if d == chosen else None for d in range(parameter.dim()))


_SAID: weakref.WeakSet[Mesh] = weakref.WeakSet()


def _say_what_stays_whole(parameters: Sequence[tuple[str, torch.Tensor]], mesh: Mesh) -> None:
    """A warning, for the first module with such parameters on a mesh."""
    whole = [(name, p) for name, p in parameters if not any(_spec(p, mesh)) and p.numel()]
    if not whole or mesh in _SAID or mesh.shape()["fsdp"] == 1:
        return
    _SAID.add(mesh)
    names = ", ".join(name for name, _ in whole[:3]) + (f" and {len(whole) - 3} more" if len(whole) > 3 else "")
    logger.warning(
        "SpmdFullyShardedDataParallel: the %d devices of 'fsdp' divide no dim of %s: %d bytes stay whole on every device, as do their gradients and the "
        "optimizer's state (torch_xla pads them; values are the same)",
        mesh.shape()["fsdp"], names, sum(p.numel() * p.element_size() for _, p in whole),
    )  # fmt: skip


def _wrap_inside(module: nn.Module, policy: Callable[..., bool], wrapper: Callable[..., nn.Module], **options: object) -> None:
    """Wrap the submodules that a policy chooses."""
    from torch_bridge.torch_xla.distributed.fsdp import wrap

    wrap.recursive_wrap(
        module,
        auto_wrap_policy=policy,
        wrapper_cls=wrapper,
        ignored_modules=set(),
        ignored_params=set(),
        only_wrap_children=True,
        **options,
    )
