"""Random state of the device: a seed and a count of the random ops since it was set.

A random op records *which* draw of which seed it is; the compiled program gets (seed, offset) as inputs, so neither a new step nor
a new seed recompiles. Restoring a state replays the same draws, which activation checkpointing relies on.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_bridge import ranks, world

_STATE_WORDS = 2
_DRAWS = 48
"""Bits for the number of draws in a state; the rest says along which axes they differ."""


class RngState:
    """Seed and draw counter of one generator (`torch.xla` default, or one per `torch.Generator`).

    axes: mesh axes along which ranks draw different numbers even for values they share (a tracker's model-parallel state, a seed that differs by rank).
    """

    __slots__ = ("_epoch", "_seeds", "axes", "offset", "seed")

    def __init__(self, seed: int = 0, offset: int = 0, axes: tuple[str, ...] = ()):
        self.seed = seed
        self.offset = offset
        self.axes = axes
        self._seeds: tuple[int, ...] | None = None
        self._epoch = 0

    def manual_seed(self, seed: Any) -> None:
        """Start anew. A seed that differs by rank (`seed + xm.get_ordinal()`) has those ranks draw different numbers that differ in it."""
        values = ranks.values_of(seed)
        self.seed, self.offset, self.axes = int(seed if values is None else values[0]) & 0xFFFFFFFFFFFFFFFF, 0, ()
        self._seeds = values
        if values is not None:
            self._differ(values)

    def _differ(self, seeds: tuple[int, ...]) -> None:
        self.axes, self._epoch = world.axes_of_table(seeds), world.current().epoch

    def take(self) -> tuple[Any, ...]:
        """(seed, offset) of the next draw, and the mesh axes along which ranks draw differently if there are any."""
        if self._seeds is not None and self._epoch != world.current().epoch:
            self._differ(self._seeds)  # the mesh has other axes now
        offset = self.offset
        self.offset = offset + 1
        return (self.seed, offset, self.axes) if self.axes else (self.seed, offset)

    def get_state(self) -> torch.Tensor:
        """The state as a CPU uint8 tensor of 16 bytes: the seed; the number of draws, and which axes in the highest bits."""
        signed = self.seed - (1 << 64) if self.seed >= (1 << 63) else self.seed
        return torch.tensor([signed, self.offset | self._mask() << _DRAWS], dtype=torch.int64).view(torch.uint8).clone()

    def _mask(self) -> int:
        """`axes` as bits, and how many there are in the mesh; 0 if there are none."""
        names = tuple(world.current().axes)
        return len(names) << 8 | sum(1 << k for k, name in enumerate(names) if name in self.axes) if self.axes else 0

    def set_state(self, state: torch.Tensor) -> None:
        if state.dtype != torch.uint8 or state.numel() != 8 * _STATE_WORDS:
            raise TypeError(
                f"an xla RNG state is a CPU uint8 tensor of {8 * _STATE_WORDS} bytes, got {state.dtype} with {state.numel()} elements; "
                "pass what torch.xla.get_rng_state() returned"
            )
        seed, draws = state.clone().view(torch.int64).tolist()
        mask, names = draws >> _DRAWS, tuple(world.current().axes)
        known = mask >> 8 == len(names)  # else the mesh has other axes now: all of them
        self.seed, self.offset = seed & 0xFFFFFFFFFFFFFFFF, draws & ((1 << _DRAWS) - 1)
        self.axes, self._seeds = tuple(name for k, name in enumerate(names) if mask and (not known or mask >> k & 1)), None


DEFAULT = RngState()

_GENERATORS: dict[int, RngState] = {}


def of_generator(generator: torch.Generator | None) -> RngState:
    """The state behind a `generator=` argument.

    None: the default. A generator (an xla one is a CPU generator too, see `generators`) gives one seed, so that seeding it seeds the op and
    a second op draws on, as on the CPU.
    """
    if generator is None:
        return DEFAULT
    seed = torch.empty((), dtype=torch.int64).random_(generator=generator)
    return RngState(int(seed))
