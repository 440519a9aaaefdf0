"""The host's random states while something runs once for each rank: every rank's run sees them as if it were alone.

All runs begin in the same state, after a seed that differs by rank each in its own rank's (`rank_random`, `rank_draws`). Where ranks share a run, but not a
state, the run draws for all of them (a tensor that differs by rank), and each rank's draws are picked out of what it gives.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torch_bridge.mesh import rank_numbers, world
from torch_bridge.per_rank import rank_draws
from torch_bridge.recorder import rank_random


class RandomStates:
    """keys: for each hosted rank, what stands for its run. generators: torch's that the runs draw from, besides the default one.

    Use: `begin()`, then `with of(key):` for each run, then `end()`; and again.
    """

    def __init__(self, keys: Sequence[Any], generators: Sequence[torch.Generator] = ()):
        self._keys = list(keys)
        self._sources = [_NAMED["torch"], *[(g.get_state, g.set_state) for g in generators]]
        if threading.current_thread() is threading.main_thread():  # else another may be drawing
            self._sources += [_NAMED["python"], _NAMED["numpy"]]
        self._start: list[Any] = []
        self._left: list[Any] | None = None
        self._after: dict[Any, list[Any]] = {}
        self._apart = False

    def begin(self) -> None:
        """Runs go on where they ended, unless somebody has drawn or seeded since."""
        now = self._read()
        if self._left is None or not _same(now, self._left):
            self._start, self._after = now, {}
            self._apart = self._is_apart()

    @contextlib.contextmanager
    def of(self, key: object) -> Iterator[None]:
        """Within, one of the runs."""
        self._write(self._after[key] if key in self._after else self._first(key))
        try:
            yield
        finally:
            self._after[key] = self._read()

    def end(self) -> None:
        """The states are as after the first hosted rank's run; each rank's as after its own where they differ."""
        if self._apart:
            each = [self._after[key] for key in self._keys]
            self._write([_join(states, like) for *states, like in zip(*each, self._start, strict=True)])
        else:
            self._write(self._after[self._keys[0]])
        self._left = self._read()

    def undo(self) -> None:
        """The states are as before the runs."""
        self._write(self._start)

    def first_alike(self) -> list[int] | None:
        """For each hosted rank the first one that would draw the same; None if all would."""
        now = self._read()
        if not any(map(_differs, now)):
            return None
        count = max(len(each(state)) for state in now)
        ranks = [_comparable_all(own) for own in zip(*[_split(state, count) for state in now], strict=True)]
        found = [ranks.index(own) for own in ranks]
        return found if any(found) else None

    def _first(self, key: Any) -> list[Any]:
        return [_split(s, len(self._keys))[self._keys.index(key)] for s in self._start] if self._apart else self._start

    def _is_apart(self) -> bool:
        """Whether ranks have states of their own, and those that share a run share one."""
        each = list(zip(*[_split(s, len(self._keys)) for s in self._start], strict=True))
        return any(map(_differs, self._start)) and all(
            _same(own, each[self._keys.index(key)]) for own, key in zip(each, self._keys, strict=True)
        )

    def _read(self) -> list[Any]:
        return [_of_this_world(read()) for read, _ in self._sources]

    def _write(self, states: Sequence[Any]) -> None:
        for (_, write), state in zip(self._sources, states, strict=True):
            write(state)


def of_ranks() -> dict[str, list[Any]]:
    """Python's, NumPy's and torch's state (`NAMES`): one, or a list with each hosted rank's where they differ."""
    return {name: each(_of_this_world(read())) for name, (read, _) in _NAMED.items()}


def put_for_ranks(states: Mapping[str, Sequence[Any]]) -> None:
    """Put back what `of_ranks` gave, or such states from elsewhere: one for all hosted ranks, or one for each."""
    for name, (_, write) in _NAMED.items():
        write(joined(states[name]))


def each(state: Any) -> list[Any]:
    """Each hosted rank's of such a state as `torch.get_rng_state`, `random.getstate` or `np.random.get_state` gives; a single one where ranks share it."""
    return _split(state, 1)


def joined(states: Sequence[Any]) -> Any:
    """The other way round: a state that is alike for all ranks, or knows each one's."""
    if all(_same([s], [states[0]]) for s in states[1:]):
        return states[0]
    rank_numbers.prepare()  # what puts a state back must know of such ones
    return _together(states)


_NAMED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "python": (lambda: random.getstate(), lambda state: random.setstate(state)),
    "numpy": (lambda: np.random.get_state(), lambda state: np.random.set_state(state)),
    "torch": (lambda: torch.get_rng_state(), lambda state: torch.set_rng_state(state)),
}
NAMES = tuple(_NAMED)


def _differs(state: object) -> bool:
    """Whether it holds a state for each hosted rank."""
    return rank_random.is_joined(state) if isinstance(state, torch.Tensor) else rank_draws.is_joined(state)


def _of_this_world(state: Any) -> Any:
    """The same; the first rank's for all if it is from a world of another size."""
    return state if not _differs(state) or len(found := each(state)) == len(world.current().hosted) else found[0]


def _split(state: object, count: int) -> list[Any]:
    if not _differs(state):
        return [state] * count
    return rank_random.split(state) if isinstance(state, torch.Tensor) else rank_draws.split(state)


def _join(states: Sequence[Any], like: object) -> Any:
    return _together(states) if _differs(like) else states[0]


def _together(states: Sequence[Any]) -> Any:
    """One state that knows each rank's."""
    return torch.cat(list(states)) if isinstance(states[0], torch.Tensor) else rank_draws.join(states)


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return _comparable_all(a) == _comparable_all(b)


def _comparable_all(states: Sequence[Any]) -> list[Any]:
    return [_comparable(x) for x in states]


def _comparable(state: object) -> Any:
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    if _differs(state):
        return [_comparable(x) for x in rank_draws.split(state)]
    return [x.tobytes() if isinstance(x, np.ndarray) else x for x in state] if isinstance(state, tuple) else repr(state)
