"""Random state of the device: a seed and a count of the random ops since it was set.

A random op records *which* draw of which seed it is; the compiled program gets (seed, offset) as inputs, so neither a new step nor
a new seed recompiles. Restoring a state replays the same draws, which activation checkpointing relies on.
"""

from __future__ import annotations

from typing import Any

import torch

_STATE_WORDS = 2


class RngState:
    """Seed and draw counter of one generator (`torch.xla` default, or one per `torch.Generator`).

    axes: mesh axes along which ranks draw different numbers even for values they share (a tracker's model-parallel state).
    """

    __slots__ = ("axes", "offset", "seed")

    def __init__(self, seed: int = 0, offset: int = 0, axes: tuple[str, ...] = ()):
        self.seed = seed
        self.offset = offset
        self.axes = axes

    def manual_seed(self, seed: int) -> None:
        self.seed, self.offset = int(seed) & 0xFFFFFFFFFFFFFFFF, 0

    def take(self) -> tuple[Any, ...]:
        """(seed, offset) of the next draw, and the mesh axes along which ranks draw differently if there are any."""
        offset = self.offset
        self.offset = offset + 1
        return (self.seed, offset, self.axes) if self.axes else (self.seed, offset)

    def get_state(self) -> torch.Tensor:
        """The state as a CPU uint8 tensor of 16 bytes."""
        signed = self.seed - (1 << 64) if self.seed >= (1 << 63) else self.seed
        return torch.tensor([signed, self.offset], dtype=torch.int64).view(torch.uint8).clone()

    def set_state(self, state: torch.Tensor) -> None:
        if state.dtype != torch.uint8 or state.numel() != 8 * _STATE_WORDS:
            raise TypeError(
                f"an xla RNG state is a CPU uint8 tensor of {8 * _STATE_WORDS} bytes, got {state.dtype} with {state.numel()} elements; "
                "pass what torch.xla.get_rng_state() returned"
            )
        seed, offset = state.clone().view(torch.int64).tolist()
        self.seed, self.offset = seed & 0xFFFFFFFFFFFFFFFF, offset


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
