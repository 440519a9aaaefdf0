"""Random numbers of the host after a seed that differs by rank: each rank draws what it would draw alone.

`torch.manual_seed(seed + rank)`, and `manual_seed` of a `torch.Generator`, give a CPU generator a state for each hosted rank (`Streams`). The generator itself
is in the first one's. A torch function that draws from it then runs once for each rank, and gives a CPU tensor that differs by rank (`rank_tensor`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torch_bridge import source
from torch_bridge.mesh import generators, rank_numbers

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


def of(generator: Any) -> Streams | None:
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


def seed(generator: Any, number: Any, original: Callable[[Any], Any]) -> None:
    """`manual_seed`, with a number that may differ by rank. original: what seeds the generator with a plain one."""
    if not rank_numbers.is_ranked(number):
        _set(generator, None)
        original(number)
        return
    states = []
    for place in reversed(range(_hosted())):
        original(int(rank_numbers.own(number, place)))
        states.append(generator.get_state() if generator is torch.default_generator else _plain_state(generator))
    _set(generator, Streams(states[::-1]) if len(states) > 1 else None)


def _plain_state(generator: Any) -> torch.Tensor:
    return torch._C.Generator.get_state(generator)


def _hosted() -> int:
    from torch_bridge.mesh import world

    return len(world.current().hosted)


def get_state(generator: Any) -> torch.Tensor:
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


def set_state(generator: Any, state: torch.Tensor) -> None:
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

    def close(self) -> None:
        """All have: the generators are in the first rank's state."""
        for g in self._generators:
            streams = of(g)
            if streams is not None:
                torch._C.Generator.set_state(g, streams.states[0])


def on_each(run: Callable[[int], Any], among: Iterable[Any] = ()) -> list[Any]:
    """What `run(place)` gives for each hosted rank. among: the generators that it may draw from; default: torch's."""
    turns = Turns(among)
    found = []
    try:
        for place in range(_hosted()):
            turns.begin(place)
            found.append(run(place))
            turns.end(place)
    finally:
        turns.close()
    return found


# -- torch functions that draw ------------------------------------------------------------------------

_FUNCTIONS = (
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial", "poisson", "binomial",
    "dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "rrelu",
)  # fmt: skip
_METHODS = ("bernoulli", "multinomial")
_WRITING = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_")


@functools.cache
def install() -> None:
    """Once there is a number that differs by rank."""
    from torch_bridge.recorder import rank_tensor

    for owner, names, wrapped in (
        (torch, _FUNCTIONS, _drawing), (torch.Tensor, _METHODS, _drawing), (torch.Tensor, _WRITING, _filling),
    ):  # fmt: skip
        for name in names:
            rank_tensor.replace(owner, name, wrapped(getattr(owner, name)))
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "rrelu"):
        setattr(torch._VF, name, getattr(torch, name))
    for name, function in _STATES.items():
        setattr(torch, name, function)
        setattr(torch.random, name, function)


def _get_rng_state() -> torch.Tensor:
    """`torch.get_rng_state`: all ranks' states one after another after a seed that differs by rank."""
    return get_state(torch.default_generator)


def _set_rng_state(new_state: torch.Tensor) -> None:
    """`torch.set_rng_state`: also what `torch.get_rng_state` gave after a seed that differs by rank."""
    set_state(torch.default_generator, new_state)


def _seed() -> int:
    _set(torch.default_generator, None)
    return _original_seed()


_original_seed = torch.seed
_STATES = {"get_rng_state": _get_rng_state, "set_rng_state": _set_rng_state, "seed": _seed}


def _ranked_generator(args: Any, kwargs: Any) -> Any:
    """The generator that a call draws from, if ranks draw differently from it on the CPU."""
    generator = kwargs.get("generator")
    if generator is None:
        generator = next((a for a in args if isinstance(a, torch._C.Generator)), torch.default_generator)
    if of(generator) is None:
        return None
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    device = kwargs.get("device")
    where = torch.device(device).type if device is not None else tensors[0].device.type if tensors else torch.get_default_device().type
    return generator if where == "cpu" else None


def _drawing(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a tensor of random numbers."""

    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        generator = _ranked_generator(args, kwargs) if _streams_exist(args, kwargs) else None
        if generator is None:
            return original(*args, **kwargs)
        return _drawn(original, generator, args, kwargs)

    return draw


def _streams_exist(args: Any, kwargs: Any) -> bool:
    """Quickly: whether any generator of the call was seeded by rank."""
    return (
        _default is not None
        or getattr(kwargs.get("generator"), "_streams", None) is not None
        or any(type(a) in _generators() for a in args)
    )


@functools.cache
def _generators() -> set[type]:
    return {generators.CPUGenerator, generators.XLAGenerator}


def _drawn(original: Callable[..., Any], generator: Any, args: Any, kwargs: Any) -> Any:
    from torch_bridge.recorder import rank_tensor

    name = getattr(original, "__name__", "")
    leaves = tree_leaves((args, kwargs))
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves):
        raise rank_numbers.PlainNumberNeeded(
            f"torch.{name} of a CPU tensor that needs gradients, at {source.user_line()}, after a seed that differs by rank: each rank would get another "
            "result, and gradients of such results are worked out on xla only. Move the tensor to xla first (x.to('xla'))."
        )
    return rank_tensor.compute(original, args, kwargs, [generator])


def _filling(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that fills a tensor with random numbers."""

    @functools.wraps(original)
    def fill(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not _streams_exist(args, kwargs):
            return original(self, *args, **kwargs)
        generator = _ranked_generator((self, *args), kwargs)
        if generator is None:
            return original(self, *args, **kwargs)
        return _filled(original, generator, self, args, kwargs)

    return fill


def _filled(original: Callable[..., Any], generator: Any, t: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    """A CPU tensor filled with each rank's own numbers: it becomes one that differs by rank, or remembers what the other ranks have."""
    from torch_bridge.recorder import rank_tensor

    if isinstance(t, rank_tensor.RankTensor):
        return original(t, *args, **kwargs)
    loader = _data_frame()
    parts = on_each(lambda place: original(t.detach().clone(), *_own(args, place), **_own(kwargs, place)), [generator])
    if loader is not None:
        _note_loader(loader)
        with torch.no_grad():
            return t.copy_(parts[0])
    return rank_tensor.become(t, parts)


def _own(given: Any, place: int) -> Any:
    from torch_bridge.recorder import rank_tensor

    return rank_tensor.own(given, place)


# -- what is drawn for all ranks ------------------------------------------------------------------------

_said: set[tuple[str, int]] = set()


def _data_frame() -> FrameType | None:
    """The frame of torch's sampler or loader that draws, if one does: its numbers choose the data of the script's one loader."""
    frame: FrameType | None = sys._getframe(3)
    return frame if frame is not None and "/torch/utils/data/" in frame.f_code.co_filename else None


def _note_loader(frame: FrameType) -> None:
    if not frame.f_code.co_filename.endswith("sampler.py"):
        return
    say(
        "shuffles data after torch.manual_seed with a seed that differs by rank. This process reads one batch for all ranks, so all get rank 0's order. Give "
        "the loader the rank (DistributedSampler(rank=...)), or start one process per rank with torchrun."
    )


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
