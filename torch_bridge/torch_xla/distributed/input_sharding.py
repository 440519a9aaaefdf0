"""Batches that are divided over the devices as they are moved there: `input_sharding` of loaders and of `xm.send_cpu_data_to_device`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torch_bridge import nested
from torch_bridge.mesh import world
from torch_bridge.recorder import prefetch


def checked(given: object) -> Any:
    """An `xs.ShardingSpec`, a dict of them, or None; raises TypeError for anything else, and RuntimeError without `xr.use_spmd`."""
    if given is None:
        return None
    from torch_bridge.torch_xla.distributed.spmd import marking, meshes

    meshes.require_on()
    specs = list(given.values()) if isinstance(given, Mapping) else [given]
    for spec in specs:
        if spec is not None and not isinstance(spec, marking.ShardingSpec):
            raise TypeError(f"input_sharding takes an xs.ShardingSpec, or a dict of them by the keys of a batch, got {type(spec).__name__}")
    return given


def move(data: object, device: torch.device, sharding: object) -> Any:
    """Nested data with its CPU tensors on a device, divided as the sharding says. A dict of shardings needs data that is a dict with these keys."""
    if sharding is not None and world.process_count() > 1:
        data = _joined(data, sharding)
    moved = prefetch.to_device(data, device)
    if sharding is None:
        return moved
    if not isinstance(sharding, Mapping):
        _divide(moved, sharding)
        return moved
    if not isinstance(moved, Mapping):
        raise ValueError(
            f"input_sharding is a dict by the keys of a batch ({', '.join(map(str, sharding))}), the batch is a {type(moved).__name__}"
        )
    missing = [str(key) for key in moved if key not in sharding]
    if missing:
        raise KeyError(
            f"input_sharding says nothing of {', '.join(missing)} of the batch; it has {', '.join(map(str, sharding))} (None: replicated)"
        )
    for key, part in moved.items():
        if sharding[key] is not None:
            _divide(part, sharding[key])
    return moved


def _joined(data: Any, sharding: Any) -> Any:
    """Nested data in which tensors that a spec with `minibatch=True` applies to are on xla: one of what each process has of it."""
    if isinstance(sharding, Mapping):
        return {k: _joined(v, sharding.get(k)) for k, v in data.items()} if isinstance(data, Mapping) else data
    if sharding is None or not sharding.minibatch:
        return data

    def part(x: object) -> bool:
        return isinstance(x, torch.Tensor) and x.device.type == "cpu" and sharding.can_apply(x)

    return nested.replace(data, part, [sharding.joined(t) for t in nested.collect(data, part)])


def _divide(data: object, spec: Any) -> None:
    for t in nested.collect(data, lambda x: isinstance(x, torch.Tensor)):
        if spec.can_apply(t):
            spec.apply(t)
