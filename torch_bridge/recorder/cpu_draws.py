"""In-place random numbers for weights that a process of its own would still have on the CPU.

In a process that hosts several ranks the parts of a parallel layer's weights are on xla from the start. A script that draws them anew
(`layer.weight.data.normal_()`) before it moves the model draws from the CPU's random state under `torchrun`, and so it does here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_bridge.mesh import sharding, world
from torch_bridge.recorder import rank_random
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.recorder.uploads import upload_blocks


def mark(t: torch.Tensor, is_on_cpu: bool = True) -> None:
    """Say of an xla tensor's storage whether it stands for a tensor on the CPU."""
    if isinstance(t, XLATensor) and (is_on_cpu or t._storage.facts is not None):
        t._storage.describe(cpu=is_on_cpu)


def is_marked(t: object) -> bool:
    """Whether the storage stands for a tensor on the CPU."""
    return isinstance(t, XLATensor) and t._storage.facts is not None and t._storage.facts.cpu


def draw(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """An in-place random op on such a tensor, of the shape that one rank sees: all ranks draw the same, or each its own after a seed that differs by rank."""
    target, generator = args[0], (kwargs or {}).get("generator")

    def own(place: int) -> torch.Tensor:
        made = torch.empty(target.shape, dtype=target.dtype)
        func(made, *args[1:], **(kwargs or {}))
        return made

    streams = rank_random.of(generator)
    axes = () if streams is None else _axes(streams.states)
    parts = (
        [own(0)] * len(world.current().hosted) if streams is None else rank_random.on_each(own, [] if generator is None else [generator])
    )
    spec = _spec(target, axes)
    target.copy_(parts[0] if spec is None else upload_blocks(parts, spec))  # ranks are expected to differ again
    return target


def _axes(states: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """The mesh axes along which ranks draw from different states."""
    return (
        world.axes_of_table([s.numpy().tobytes() for s in states]) if world.is_local() or world.size() == 1 else tuple(world.current().axes)
    )


def _spec(target: XLATensor, axes: Sequence[str]) -> Any:
    """How what was drawn lies on the mesh: as the whole target does if that says enough. None: it is the same on all ranks."""
    expected = target._storage.spec if target._layout is target._storage.layout else None
    if expected is None:
        return sharding.spec_for(axes) if axes else None
    if set(axes) <= sharding.axes_of(expected):
        return expected
    return sharding.spec_for({*axes, *sharding.axes_of(expected)})
