"""`DistributedDataParallel` on xla with `find_unused_parameters` or `static_graph`.

torch's reducer has a map of the parameters that a forward used, which it sums over ranks. For a device that is no CPU it copies the map through pinned memory,
which xla has not. The map is small integers that the host knows, so it stays on the CPU, and ranks exchange it as an object.
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
    """While a reducer is made: integers that it wants on xla are made on the CPU. Its other tensors are gradients, which are floats."""

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
            used.map_of_used_parameters = True
            return used
        return func(*args, **kwargs)


class Reducer(_torch_reducer):
    """`torch.distributed.Reducer`, whose map of used parameters is on the CPU."""

    def __init__(self, *args: Any, **kwargs: Any):
        with _MapOnHost():
            super().__init__(*args, **kwargs)

    def _set_static_graph(self) -> None:
        with _MapOnHost():
            super()._set_static_graph()


def sum_map(tensor: torch.Tensor, groups: GroupLike) -> bool:
    """Sum a reducer's map over a group, in place; False, and nothing done, for another tensor."""
    if not getattr(tensor, "map_of_used_parameters", False):
        return False
    parts = object_collectives.all_gather(tensor.clone(), "used parameters", groups)
    tensor.copy_(torch.stack(parts).sum(0))
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
