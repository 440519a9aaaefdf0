"""Which arrays there are while a step of a pipeline runs: found among JAX's live arrays after each action."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from torch_bridge.mesh.places import Place


@dataclass
class Kept:
    """An array.

    Attributes:
        born: the number of the action that made it; -1: it was there before the step.
        died: the number of the action after which it was gone; None: it was there after the step.
        sizes: (pipeline rank, bytes on the first core of that rank), of the ranks that it lies on.
        scalar: whether it is a single number, such as a loss.
    """

    born: int
    died: int | None
    sizes: tuple[tuple[int, int], ...]
    scalar: bool


class Arrays:
    """All arrays that are there before a step, and those that it makes.

    homes: by pipeline rank, its place; None where there are no places.
    """

    def __init__(self, homes: Sequence[Place | None]):
        self.devices = tuple(None if home is None or home.mesh is None else home.mesh.devices.flat[0] for home in homes)
        self.found: list[Kept] = []
        self._alive: dict[int, tuple[weakref.ref[Any], Kept]] = {}
        self.look(-1)

    def look(self, action: int) -> list[Any]:
        """Note what there is after an action, by its number: what is new, is given back, and what is gone."""
        new = []
        alive: dict[int, tuple[weakref.ref[Any], Kept]] = {}
        for array in jax.live_arrays():
            known = self._alive.get(id(array))
            if known is None or known[0]() is not array:
                sizes = _sizes(array.sharding, array.shape, array.dtype.itemsize, self.devices)
                known = weakref.ref(array), Kept(action, None, sizes, not array.shape)
                self.found.append(known[1])
                new.append(array)
            alive[id(array)] = known
        for key, (_, kept) in self._alive.items():
            if key not in alive or alive[key][1] is not kept:
                kept.died = action
        self._alive = alive
        return new


@functools.lru_cache(maxsize=4096)
def _sizes(lies: Any, shape: tuple[int, ...], itemsize: int, devices: tuple[Any, ...]) -> tuple[tuple[int, int], ...]:
    size = math.prod(lies.shard_shape(shape)) * itemsize
    return tuple((rank, size) for rank, device in enumerate(devices) if device is None or device in lies.device_set)
