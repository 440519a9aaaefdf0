"""Integers of `DistributedDataParallel` on xla that stay on the CPU.

torch's reducer has a map of the parameters that a forward used (`find_unused_parameters`, `static_graph`), which it sums over ranks. For a device that is no
CPU it copies the map through pinned memory, which xla has not. In the second step it lays gradients out in the order in which they came on the first rank.
Both are small integers that the host knows, so they stay on the CPU, and ranks exchange them as objects: no program runs in the middle of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import distributed
from torch.utils._python_dispatch import TorchDispatchMode

from torch_bridge.collectives import object_collectives
from torch_bridge.mesh.groups import GroupLike

_torch_reducer: Any = dist.Reducer


class _MapOnHost(TorchDispatchMode):
    """While a reducer makes them: integers that it wants on xla are made on the CPU. Its other tensors are gradients, which are floats."""

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if (
            func is torch.ops.aten.empty.memory_format
            and kwargs.get("dtype") == torch.int32
            and device is not None
            and device.type == "xla"
        ):
            used = func(*args, **{**kwargs, "device": torch.device("cpu")})
            used.integers_of_a_reducer = True
            return used
        return func(*args, **kwargs)


class Reducer(_torch_reducer):
    """`torch.distributed.Reducer`, whose map of used parameters and order of gradients are on the CPU."""

    def __init__(self, *args: Any, **kwargs: Any):
        with _MapOnHost():
            super().__init__(*args, **kwargs)

    def _set_static_graph(self) -> None:
        with _MapOnHost():
            super()._set_static_graph()

    def _rebuild_buckets(self) -> bool:
        with _MapOnHost():
            return bool(super()._rebuild_buckets())


def sum_map(tensor: torch.Tensor, groups: GroupLike) -> bool:
    """Sum a reducer's map over a group, in place; False, and nothing done, for another tensor."""
    if not getattr(tensor, "integers_of_a_reducer", False):
        return False
    parts = object_collectives.all_gather(tensor.clone(), "used parameters", groups)
    tensor.copy_(torch.stack(parts).sum(0))
    return True


def take_order(tensor: torch.Tensor, root: int, groups: GroupLike) -> bool:
    """Give a group's ranks the order of gradients of one of them, by its place there; False, and nothing done, for another tensor."""
    if not getattr(tensor, "integers_of_a_reducer", False):
        return False
    parts = object_collectives.all_gather(tensor.clone(), "order of gradients", groups)
    tensor.copy_(parts[root])
    return True


def _refusing_xla(set_up: Callable[[Any, torch.nn.Module], None]) -> Callable[[Any, torch.nn.Module], None]:
    @functools.wraps(set_up)
    def _setup_mixed_precision_params(config: Any, root_module: torch.nn.Module) -> None:
        if any(p.device.type == "xla" for p in root_module.parameters()):
            raise NotImplementedError(
                f"DistributedDataParallel(mixed_precision={config}) frees and fills the memory of parameters, which xla tensors do not have. Leave it out, and "
                'compute under torch.autocast("xla", dtype=torch.bfloat16)'
            )
        set_up(config, root_module)

    return _setup_mixed_precision_params


def install() -> None:
    """Let DistributedDataParallel make such reducers, and say what xla tensors cannot do."""
    dist.Reducer = Reducer  # type: ignore[misc]
    distributed._setup_mixed_precision_params = _refusing_xla(distributed._setup_mixed_precision_params)
