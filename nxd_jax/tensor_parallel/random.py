"""Random numbers that tensor parallel ranks share, and some that they do not.

Outside `fork` all ranks draw the same numbers, as processes with one seed do (NXD_JAX_INDEPENDENT_DRAWS: different ones for a tensor that varies over ranks).
Inside `get_xla_rng_tracker().fork()` tensor parallel ranks draw different numbers, also for what they share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from nxd_jax.tensor_parallel import layer_groups
from torch_bridge.mesh import random_state, rank_numbers

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_OFFSET = 2718


class State(NamedTuple):
    """A random state. cpu: torch's CPU generator. xla: seed and number of draws of the device. axes: how ranks draw differently there (`rng.RngState.axes`)."""

    cpu: torch.Tensor
    xla: torch.Tensor
    axes: random_state.Axes = ()


def _current() -> State:
    return State(torch.get_rng_state(), random_state.DEFAULT.get_state(), random_state.DEFAULT.axes)


def _restore(state: State) -> None:
    torch.set_rng_state(state.cpu)
    device = random_state.of_state(state.xla, state.axes)
    random_state.DEFAULT.seed, random_state.DEFAULT.offset, random_state.DEFAULT.axes = device.seed, device.offset, device.axes


def _alike(one: State, other: State) -> bool:
    return torch.equal(one.cpu, other.cpu) and torch.equal(one.xla, other.xla) and one.axes == other.axes


def _seeded(cpu_seed: Any, xla_seed: Any, axes: tuple[str, ...]) -> State:
    """The state that seeding gives; the current one stays. Seeds may differ by rank. axes: mesh axes along which ranks with one seed draw differently."""
    device = random_state.RngState()
    device.manual_seed(xla_seed)
    return State(torch.Generator().manual_seed(cpu_seed).get_state(), device.get_state(), device.axes or axes)


class XLARNGStatesTracker:
    """Named random states. `fork(name)` swaps one in for the default state, of the CPU and of xla, and keeps what it becomes for the next fork."""

    def __init__(self) -> None:
        self.states_: dict[str, State] = {}
        self.seeds_: set[Any] = set()
        self._on_fork: Callable[[str], None] | None = None

    def reset(self) -> None:
        """Forget all states."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, State]:
        """A copy of all states, by name: plain tensors and tuples that `torch.save` takes."""
        return {name: State(s.cpu.clone(), s.xla.clone(), s.axes) for name, s in self.states_.items()}

    def set_states(self, states: dict[str, State]) -> None:
        """Replace all states by what `get_states` returned. Raises TypeError for other things, such as the bare CPU states of NxD."""
        found = {}
        for name, state in states.items():
            if not isinstance(state, (tuple, list)) or len(state) != 3:
                raise TypeError(f"rng state {name} must be one that get_states() returned, got {type(state).__name__}")
            found[name] = State(state[0], state[1], tuple(state[2]))
        self.states_ = found

    def add(self, name: str, seed: Any) -> None:
        """Add a state with a seed. A seed that differs by rank (`seed + get_tensor_model_parallel_rank()`) gives each of those ranks its own numbers.

        Raises Exception if the seed or the name is taken.
        """
        self._add(name, seed, seed, ())

    def _add(self, name: str, cpu_seed: Any, xla_seed: Any, axes: tuple[str, ...]) -> None:
        known = tuple(rank_numbers.per_rank(cpu_seed)) if rank_numbers.is_ranked(cpu_seed) else int(cpu_seed)
        if known in self.seeds_:
            raise Exception(f"seed {cpu_seed} already exists")
        if name in self.states_:
            raise Exception(f"rng state {name} already exists")
        self.seeds_.add(known)
        self.states_[name] = _seeded(cpu_seed, xla_seed, axes)

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Draw from a named state within the `with` block; the default state continues after it as if nothing had been drawn.

        Raises Exception if there is no such state.
        """
        if name not in self.states_:
            raise Exception(f"rng state {name} is not added: call model_parallel_xla_manual_seed(seed) or add(name, seed) first")
        if self._on_fork is not None:
            self._on_fork(name)
        before, started = _current(), self.states_[name]
        _restore(started)
        try:
            yield
        finally:
            drawn = _current()
            if not _alike(drawn, started):  # a module that writes Python's state is not played: one without dropout may be
                self.states_[name] = drawn
            _restore(before)

    @contextlib.contextmanager
    def telling(self, of: Callable[[str], None]) -> Iterator[None]:
        """A block in which `of(name)` is called for each fork."""
        outer, self._on_fork = self._on_fork, of
        try:
            yield
        finally:
            self._on_fork = outer


_tracker = XLARNGStatesTracker()


def _put(states: dict[str, State]) -> None:
    """Put states back, if they have moved: what does not fork is played, and playing stops where Python's state is written."""
    if _tracker.states_.keys() != states.keys() or any(_tracker.states_[name] is not state for name, state in states.items()):
        _tracker.states_ = states.copy()


random_state.keep_beside(lambda: _tracker.states_.copy(), _put)


def get_xla_rng_tracker() -> XLARNGStatesTracker:
    """The tracker of this process."""
    return _tracker


def model_parallel_xla_manual_seed(seed: Any) -> None:
    """Seed the default state with `seed`, and the tracker anew with a state "model-parallel-rng" that differs among tensor parallel ranks.

    That state has seed `seed + 2718 + tp_rank` on the CPU; on xla it has seed `seed + 2718` on every rank and folds in the rank. A seed that differs by rank
    (`seed + xm.get_ordinal()`) seeds each rank with its own; the state then has seed `seed + 2718 + tp_rank` on xla too.
    """
    from torch_bridge.recorder import sharded

    group = layer_groups.tensor_parallel()
    axes = sharded.axes_of(group) if layer_groups.size(group) > 1 else ()
    _tracker.reset()
    own = seed + _OFFSET + layer_groups.rank(group)
    _tracker._add(_MODEL_PARALLEL_RNG_TRACKER_NAME, own, own if rank_numbers.is_ranked(seed) else seed + _OFFSET, axes)
    random_state.DEFAULT.axes = ()
    torch.manual_seed(seed)
