"""Random numbers of the host after a seed that differs by rank: each rank draws what it would draw alone.

`torch.manual_seed(seed + rank)`, and `manual_seed` of a `torch.Generator`, give a CPU generator a state for each hosted rank (`Streams`). The generator itself
is in the first one's. What draws from it then runs once for each rank (`on_each`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch

from torch_bridge import source
from torch_bridge.mesh import generators, rank_numbers, world

_STATE_BYTES = torch._C.Generator().get_state().numel()


class Streams:
    """A CPU generator's state on each hosted rank."""

    def __init__(self, states: Sequence[torch.Tensor]):
        self.states = list(states)

    def joined(self) -> torch.Tensor:
        """All states one after another: what `get_state` gives."""
        return torch.cat(self.states)


_default: Streams | None = None
"""Of torch's default generator."""


def of(generator: torch.Generator | None) -> Streams | None:
    """The states of a generator (None: torch's default one) that was seeded by rank."""
    if generator is None or generator is torch.default_generator:
        return _default
    return getattr(generators.known(generator), "_streams", None)


def _set(generator: Any, streams: Streams | None) -> None:
    global _default
    if generator is torch.default_generator:
        _default = streams
    elif streams is not None or hasattr(generator, "_streams"):
        generator._streams = streams


def forget(generator: torch.Generator) -> None:
    """All ranks draw the same from a generator again."""
    _set(generator, None)


def seed(generator: torch.Generator, number: Any, original: Callable[[Any], Any]) -> None:
    """`manual_seed`, with a number that may differ by rank. original: what seeds the generator with a plain one."""
    if not rank_numbers.is_ranked(number):
        forget(generator)
        original(number)
        return
    states = []
    for place in reversed(range(_hosted())):
        original(int(rank_numbers.own(number, place)))
        states.append(generator.get_state() if generator is torch.default_generator else _plain_state(generator))
    _set(generator, Streams(states[::-1]) if len(states) > 1 else None)


def _plain_state(generator: torch.Generator) -> torch.Tensor:
    return torch._C.Generator.get_state(generator)


def _hosted() -> int:
    return len(world.current().hosted)


def get_state(generator: torch.Generator) -> torch.Tensor:
    """`generator.get_state()`: all ranks' states one after another where they differ."""
    streams = of(generator)
    if streams is None:
        return _plain_state(generator)
    streams.states[0] = _plain_state(generator)
    return streams.joined()


def is_joined(state: torch.Tensor) -> bool:
    """Whether this is what `get_state` gives after a seed that differs by rank."""
    return _hosted() > 1 and state.numel() == _STATE_BYTES * _hosted()


def split(state: torch.Tensor) -> list[torch.Tensor]:
    """Each hosted rank's state of such a one."""
    return [s.clone() for s in state.split(_STATE_BYTES)]  # torch reads from the start of the memory


def set_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Put back what `get_state` gave; of a world of another size the first rank's state, for all."""
    count = state.numel() // _STATE_BYTES if state.dtype == torch.uint8 and state.dim() == 1 and state.numel() % _STATE_BYTES == 0 else 1
    states = split(state) if count > 1 else [state]
    torch._C.Generator.set_state(generator, states[0])
    _set(generator, Streams(states) if count > 1 and count == _hosted() else None)


class Turns:
    """For running something once for each hosted rank: each time the generators are in that rank's state; ranks that share one all start from it."""

    def __init__(self, among: Iterable[Any]):
        self._generators = list(among) or [torch.default_generator]
        self._before = [_plain_state(g) for g in self._generators]
        for g, state in zip(self._generators, self._before, strict=True):
            streams = of(g)
            if streams is not None:
                streams.states[0] = state  # code that nobody follows may have drawn

    def begin(self, place: int) -> None:
        """The rank at this place is next."""
        for g, state in zip(self._generators, self._before, strict=True):
            streams = of(g)
            torch._C.Generator.set_state(g, state if streams is None else streams.states[place])

    def end(self, place: int) -> None:
        """It has drawn."""
        for g in self._generators:
            streams = of(g)
            if streams is not None:
                streams.states[place] = _plain_state(g)

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *error: object) -> None:
        """All have: the generators are in the first rank's state."""
        for g in self._generators:
            streams = of(g)
            if streams is not None:
                torch._C.Generator.set_state(g, streams.states[0])


def on_each(run: Callable[[int], Any], among: Iterable[Any] = ()) -> list[Any]:
    """What `run(place)` gives for each hosted rank. among: the generators that it may draw from; default: torch's."""
    found = []
    with Turns(among) as turns:
        for place in range(_hosted()):
            turns.begin(place)
            found.append(run(place))
            turns.end(place)
    return found


# -- what is drawn for all ranks ------------------------------------------------------------------------

_said: set[tuple[str, int]] = set()


def say(what: str) -> None:
    """Warn once for a line of the script; an error in strict mode."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_back is not None and not source.is_outside(frame.f_code):
        frame = frame.f_back
        level += 1
    place = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    if place in _said:
        return
    _said.add(place)
    rank_numbers.report(f"{place[0]}:{place[1]} {what}", level + 1)
