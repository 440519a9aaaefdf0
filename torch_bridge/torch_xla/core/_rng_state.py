"""The device's random state as one int, as torch_xla has it: the seed in the low 32 bits, the number of draws since in the high ones.

Where ranks draw different numbers the int differs by rank, along the same mesh axes. In another process each rank draws what its int gives alone.
"""

from __future__ import annotations

import hashlib
from typing import Any

from torch_bridge.mesh import rank_numbers, world
from torch_bridge.mesh.random_state import Axes, RngState, seed_differences

_LOW = 0xFFFFFFFF
_MAX_OFFSET = 1 << 31


def pack(state: RngState) -> Any:
    """An int below 2**63 that `restore` turns into the same state.

    A state too large for one is first replaced by a fresh seed derived from it.
    """
    if state.seed > _LOW or state.offset >= _MAX_OFFSET:
        digest = hashlib.sha256(f"{state.seed},{state.offset}".encode()).digest()
        state.seed, state.offset = int.from_bytes(digest[:4], "little"), 0
    if seed_differences(state.axes):
        return world.current().table(lambda r: state.offset << 32 | state.seeds()[r] & _LOW)
    places = [world.coordinates(axis) for axis in state.axes]
    numbers = {place: k for k, place in enumerate(dict.fromkeys(tuple(p[r] for p in places) for r in range(world.size())))}
    packed = world.current().table(lambda r: state.offset << 32 | (state.seed + numbers[tuple(p[r] for p in places)]) & _LOW)
    if state.axes:
        _axes[_seeds(packed)] = world.current().epoch, state.axes
    return packed


_axes: dict[tuple[int, ...], tuple[int, Axes]] = {}
"""By the seeds that `pack` gave ranks: in which layout and along which axes they draw different numbers of one seed. `restore` goes by it in this process."""


def _seeds(packed: Any) -> tuple[int, ...]:
    return tuple(int(v) & _LOW for v in rank_numbers.per_rank(packed))


def restore(state: RngState, packed: Any) -> None:
    """Put back what `pack` gave. Any int may be used as a seed, also one that differs by rank."""
    values = rank_numbers.values_of(packed)
    unsigned = int(packed if values is None else values[0]) & 0xFFFFFFFFFFFFFFFF
    epoch, axes = _axes.get(_seeds(packed), (None, ())) if values is not None else (None, ())
    if epoch == world.current().epoch:
        state.manual_seed(unsigned & _LOW)
        state.axes = axes
    else:
        state.manual_seed(packed & _LOW)
    state.offset = unsigned >> 32 & (_MAX_OFFSET - 1)
