"""Random numbers of a pipeline: each pass of a stage draws from a state of its own.

So a micro-batch's dropout does not depend on the schedule, nor on which process computes which stage.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from nxd_jax.tensor_parallel.random import State, get_xla_rng_tracker
from torch_bridge.mesh import random_state

_MASK = (1 << 64) - 1


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """A block after which random numbers go on as if it had not been."""
    host, device = torch.get_rng_state(), random_state.DEFAULT.get_state()
    python, numpy = random.getstate(), np.random.get_state()
    tracker = get_xla_rng_tracker()
    named = tracker.states_.copy()
    try:
        yield
    finally:
        tracker.states_ = named
        torch.set_rng_state(host)
        random_state.DEFAULT.set_state(device)
        random.setstate(python)
        np.random.set_state(numpy)


def drawn() -> tuple[bytes, bytes]:
    """What changes when torch draws random numbers, on the CPU or on xla."""
    return torch.get_rng_state().numpy().tobytes(), random_state.DEFAULT.get_state().numpy().tobytes()


def drawn_by_python() -> tuple[Any, ...]:
    """What changes when Python's or NumPy's generators of the process draw."""
    numpy: Any = np.random.get_state(legacy=False)
    numbers = tuple(x.tobytes() if isinstance(x, np.ndarray) else x for x in numpy["state"].values())
    return random.getstate(), numbers, numpy.get("has_gauss"), numpy.get("gauss")


class Draws:
    """The random states of a step. Making one advances the default state and those of the tracker (`get_xla_rng_tracker`) by one draw."""

    def __init__(self) -> None:
        tracker = get_xla_rng_tracker()
        self._default = random_state.DEFAULT.seed, random_state.DEFAULT.offset
        self._named = dict(tracker.states_)
        random_state.DEFAULT.offset += 1
        tracker.states_ = {name: _changed(state, after=True) for name, state in tracker.states_.items()}

    def seed(self, stage: int, micro_batch: int) -> int:
        """The seed of the default state in a pass of this stage over this micro-batch; offsets count from 0."""
        return _mixed(*self._default, stage, micro_batch)

    @contextlib.contextmanager
    def of(self, stage: int, micro_batch: int) -> Iterator[None]:
        """A block that draws what a pass of this stage over this micro-batch draws. Afterwards all states are as they were."""
        tracker, default = get_xla_rng_tracker(), random_state.DEFAULT
        before = default.seed, default.offset, default.axes, tracker.states_
        default.seed, default.offset = self.seed(stage, micro_batch), 0
        tracker.states_ = {name: _changed(state, stage, micro_batch) for name, state in self._named.items()}
        try:
            yield
        finally:
            default.seed, default.offset, default.axes, tracker.states_ = before


def _changed(state: State, *task: int, after: bool = False) -> State:
    """A tracker's state for a pass, or one draw later."""
    held = random_state.of_state(state.xla, state.axes)
    if after:
        held.offset += 1
    else:
        held.seed, held.offset = _mixed(held.seed, held.offset, *task), 0
    return State(state.cpu, held.get_state(), state.axes)


def _mixed(*numbers: int) -> int:
    """One number of 64 bits of several."""
    data = b"".join((n & _MASK).to_bytes(8, "little") for n in numbers)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
