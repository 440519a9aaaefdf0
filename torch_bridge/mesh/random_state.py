"""Random state of the device: a seed and a count of the random ops since it was set.

A random op records *which* draw of which seed it is; the compiled program gets (seed, offset) as inputs, so neither a new step nor
a new seed recompiles. Restoring a state replays the same draws, which activation checkpointing relies on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_bridge.config.variables import VARIABLES
from torch_bridge.mesh import generators, rank_numbers, world

_STATE_WORDS = 2
_DRAWS = 48
"""Bits for the number of draws in a state; the rest says along which axes they differ."""
_WORD = 0xFFFFFFFFFFFFFFFF
Axes = tuple[Any, ...]


def seed_differences(axes: Axes) -> tuple[int, ...] | None:
    """For draws with these `axes`: how much larger each rank's seed is than rank 0's, if seeds differ by rank."""
    return next((x for x in axes if isinstance(x, tuple)), None)


def differences_of(seed: Any) -> tuple[int, ...] | None:
    """How much larger each rank's seed is than rank 0's; None of a plain number."""
    if not rank_numbers.is_ranked(seed):
        return None
    return tuple(int(v) - _first(seed) for v in rank_numbers.per_rank(seed))


def _first(seed: Any) -> int:
    return int(rank_numbers.per_rank(seed)[0]) if rank_numbers.is_ranked(seed) else int(seed)


def names(axes: Axes) -> tuple[str, ...]:
    """The mesh axes alone."""
    return tuple(x for x in axes if isinstance(x, str))


class RngState:
    """Seed and draw counter of one generator (`torch.xla` default, or one per `torch.Generator`).

    axes: mesh axes along which ranks draw different numbers even for values they share (a tracker's model-parallel state). After a seed that differs by
    rank, an entry that is no name says how much larger each rank's seed is than `seed`, rank 0's (`seed_differences`): each rank draws what it would alone.
    """

    __slots__ = ("_epoch", "_seeds", "axes", "offset", "seed")

    def __init__(self, seed: int = 0, offset: int = 0, axes: Axes = ()):
        self.seed = seed
        self.offset = offset
        self.axes = axes
        self._epoch = 0

    def manual_seed(self, seed: Any) -> None:
        """Start anew. After a seed that differs by rank (`seed + xm.get_ordinal()`) each rank draws what its own seed gives."""
        self.seed, self.offset, self.axes = _first(seed) & _WORD, 0, ()
        differences = differences_of(seed)
        if differences is not None:
            self.differ(differences)

    def differ(self, differences: tuple[int, ...]) -> None:
        """Let each rank's seed be larger than rank 0's by as much. From a world of another size: rank 0's seed for all, as on the CPU."""
        if len(differences) != world.size():
            self.axes = ()
            return
        self.axes, self._epoch = (*world.axes_of_table(differences), differences), world.current().epoch

    def seeds(self) -> list[int]:
        """Each rank's seed."""
        found = seed_differences(self.axes)
        return [self.seed + d & _WORD for d in found] if found else [self.seed] * world.size()

    def take(self) -> tuple[Any, ...]:
        """(seed, offset) of the next draw, and `axes` if there are any."""
        found = seed_differences(self.axes)
        if found is not None and (self._epoch != world.current().epoch or len(found) != world.size()):
            self.differ(found)  # the mesh has other axes now, or the state is from another world
        offset = self.offset
        self.offset = offset + 1
        return (self.seed, offset, self.axes) if self.axes else (self.seed, offset)

    def put(self, seed: int, offset: int, axes: Axes) -> None:
        """Go on as another state, also one of a world that was laid out in another way: along those of its axes that there are."""
        differences = seed_differences(axes)
        self.seed, self.offset, self.axes = seed, offset, tuple(name for name in names(axes) if name in world.current().axes)
        if differences is not None:
            self.differ(differences)

    def get_state(self) -> torch.Tensor:
        """The state as a CPU uint8 tensor of 16 bytes: the seed; the number of draws, and which axes in the highest bits. 8 more for each rank, what its
        seed is larger by, where seeds differ."""
        found = seed_differences(self.axes) or ()
        words = [self.seed, self.offset | self._mask() << _DRAWS, *found]
        return torch.tensor([w - (1 << 64) if w >= 1 << 63 else w for w in words], dtype=torch.int64).view(torch.uint8).clone()

    def _mask(self) -> int:
        """The names among `axes` as bits, and how many there are in the mesh; 0 if there are none."""
        names = tuple(world.current().axes)
        return len(names) << 8 | sum(1 << k for k, name in enumerate(names) if name in self.axes) if self.axes else 0

    def set_state(self, state: torch.Tensor) -> None:
        sizes = (8 * _STATE_WORDS, 8 * (_STATE_WORDS + world.size()))
        if state.dtype != torch.uint8 or state.numel() not in sizes:
            raise TypeError(
                f"an xla RNG state is a CPU uint8 tensor of {sizes[0]} bytes ({sizes[1]} after a seed that differs by rank), got {state.dtype} with "
                f"{state.numel()} elements; pass what torch.xla.get_rng_state() returned"
            )
        seed, draws, *differences = state.clone().view(torch.int64).tolist()
        mask, names = draws >> _DRAWS, tuple(world.current().axes)
        known = mask >> 8 == len(names)  # else the mesh has other axes now: all of them
        self.seed, self.offset = seed & _WORD, draws & ((1 << _DRAWS) - 1)
        self.axes = tuple(name for k, name in enumerate(names) if mask and (not known or mask >> k & 1))
        if differences:
            self.differ(tuple(differences))


def of_state(state: torch.Tensor, axes: Axes) -> RngState:
    """A state from what `get_state` gave and its `axes`, also if there were other ranks then."""
    made = RngState()
    made.set_state(state[: 8 * _STATE_WORDS])
    made.axes = axes
    return made


def fits_world(axes: Axes) -> bool:
    """Whether `axes` say how much larger each rank's seed is, of as many ranks as there are."""
    found = seed_differences(axes)
    return found is not None and len(found) == world.size()


def independent() -> bool:
    """Whether ranks draw different numbers along the axes that a result varies over, also after one seed: NXD_JAX_INDEPENDENT_DRAWS."""
    return bool(VARIABLES[_SWITCH].now())


_SWITCH = "NXD_JAX_INDEPENDENT_DRAWS"

DEFAULT = RngState()

Beside = tuple[Callable[[], Any], Callable[[Any], None]]
_beside: list[Beside] = []


def keep_beside(get: Callable[[], Any], put: Callable[[Any], None]) -> None:
    """Say what else activation checkpointing puts back for its second computation: `get()` gives it (or nothing), and what it gave is put
    back by `put`."""
    _beside.append((get, put))


def beside() -> Callable[[], None] | None:
    """A function that puts back what `keep_beside` named as it is now; None if nothing was named."""
    found = [(put, state) for get, put in _beside if (state := get())]
    if not found:
        return None

    def restore() -> None:
        for put, state in found:
            put(state)

    return restore


_GENERATORS: dict[int, RngState] = {}


def of_generator(generator: torch.Generator | None) -> RngState:
    """The state behind a `generator=` argument.

    None: the default. A generator (an xla one is a CPU generator too, see `generators`) gives one seed, so that seeding it seeds the op and
    a second op draws on, as on the CPU.
    """
    if generator is None:
        return DEFAULT
    state = RngState()
    generator = generators.known(generator)
    differences = getattr(generator, "differences", None)
    state.manual_seed(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
    if differences is not None:
        state.differ(differences)
    return state
