"""Python's and NumPy's random numbers after a seed that differs by rank: each rank draws what it would draw alone.

`random.seed(seed + rank)` and `random.Random(seed + rank)` give the generator a twin for each hosted rank, `np.random.seed` and `np.random.default_rng` too.
Numbers that are drawn are each rank's own, arrays too (`rank_array`). What is drawn from a list of other things (`random.choice(files)`, a shuffled list of
names) can be only one of them: all ranks get the first one's, which is said with the line.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from torch_bridge.mesh import rank_numbers
from torch_bridge.recorder import rank_array, rank_random

_STREAMS = "_rank_streams"


@functools.cache
def install() -> None:
    """Once there is a number that differs by rank."""
    hidden: Any = random.random.__self__  # type: ignore[attr-defined]
    for name in _public(random.Random):
        method = _python_method(name, getattr(random.Random, name))
        if getattr(random, name, None) is not None:
            setattr(random, name, functools.wraps(getattr(random, name))(functools.partial(method, hidden)))
        setattr(random.Random, name, method)
    random.seed = functools.wraps(random.seed)(functools.partial(_seed_python, hidden))
    random.setstate = functools.wraps(random.setstate)(functools.partial(_set_python, hidden))
    random.Random.seed = functools.wraps(random.Random.seed)(_seed_python)  # type: ignore[method-assign]
    random.Random.setstate = functools.wraps(random.Random.setstate)(_set_python)  # type: ignore[method-assign]
    for name in _public(np.random.RandomState):
        if name not in ("seed", "set_state") and hasattr(np.random, name):
            setattr(np.random, name, _numpy_function(name, getattr(np.random, name)))
    np.random.seed = functools.wraps(np.random.seed)(_seed_numpy)
    np.random.set_state = functools.wraps(np.random.set_state)(_set_numpy)
    np.random.RandomState = _kind_of(np.random.RandomState)  # type: ignore[misc]
    np.random.default_rng = _default_rng(np.random.default_rng)


def _public(cls: type) -> list[str]:
    return [n for n in dir(cls) if not n.startswith("_") and n not in ("seed", "setstate", "VERSION") and callable(getattr(cls, n))]


def _own_seeds(given: Any) -> list[Any] | None:
    """Each hosted rank's seed; None if they are one."""
    if not rank_numbers.is_ranked(given):
        return None
    found = [rank_numbers.own(given, place) for place in range(rank_array._count())]
    return found if len(found) > 1 else None


def _together(results: Sequence[Any], what: str) -> Any:
    """One result for what each rank drew."""
    first = results[0]
    if isinstance(first, (np.ndarray, np.generic)):
        return rank_array.made(results)
    if isinstance(first, (int, float)):
        return rank_numbers.item(tuple(results))
    if isinstance(first, list) and len({len(r) for r in results}) == 1:
        return [_together(row, what) for row in zip(*results, strict=True)]
    if not all(r is first or (type(r) is type(first) and r == first) for r in results[1:]):
        rank_random.say(
            f"draws with {what} after a seed that differs by rank, and ranks draw different things that are no numbers: all ranks work with rank 0's. Draw an "
            "index and use tensors, or start one process per rank with torchrun."
        )
    return first


# -- Python's -----------------------------------------------------------------------------------------

_seed_one, _set_one = random.Random.seed, random.Random.setstate


def _alone(seed: Any = None) -> random.Random:
    """A generator of one rank's."""
    made = random.Random()
    if seed is not None:
        _seed_one(made, seed)
    return made


class _States(tuple[Any, ...]):
    """A state of Python's or NumPy's generator that remembers the other ranks'."""

    streams: list[Any]

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)


class _FirstNumber(int):
    """The first number in a state of Python's generator, which remembers the other ranks' states: Lightning makes new tuples of a state's numbers."""

    streams: list[Any]

    def __reduce__(self) -> Any:
        return int, (int(self),)


def _streams(state: Any) -> list[Any] | None:
    """Each hosted rank's state of one that remembers them; None for others."""
    if isinstance(state, _States):
        return state.streams
    if isinstance(state, tuple) and len(state) == 3 and isinstance(state[1], tuple) and isinstance(state[1][0], _FirstNumber):
        return state[1][0].streams
    return None


def is_joined(state: object) -> bool:
    """Whether a state of Python's or NumPy's generator is one for each hosted rank."""
    return _streams(state) is not None


def split(state: Any) -> list[Any]:
    """Each hosted rank's state of such a one."""
    return list(_streams(state) or ())


def join(states: Sequence[Any]) -> Any:
    """The other way round."""
    first = states[0]
    if len(first) == 3:  # Python's
        number = _FirstNumber(first[1][0])
        number.streams = list(states)
        first = first[0], (number, *first[1][1:]), first[2]
    found = _States(first)
    found.streams = list(states)
    return found


def _seed_python(self: Any, a: Any = None, version: int = 2) -> None:
    seeds = _own_seeds(a)
    self.__dict__.pop(_STREAMS, None)
    _seed_one(self, rank_numbers.own(a, 0) if seeds is None else seeds[0], version)
    if seeds is not None:
        self.__dict__[_STREAMS] = [_alone(s) for s in seeds]


def _set_python(self: Any, state: Any) -> None:
    self.__dict__.pop(_STREAMS, None)
    _set_one(self, tuple(state))
    if (states := _streams(state)) is not None:
        self.__dict__[_STREAMS] = [_alone() for _ in states]
        for stream, own in zip(self.__dict__[_STREAMS], states, strict=True):
            _set_one(stream, own)


def _python_method(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        streams = self.__dict__.get(_STREAMS)
        if streams is None:
            return original(self, *args, **kwargs)
        if name == "getstate":
            return join([s.getstate() for s in streams])
        if name == "shuffle":
            return _shuffle(streams, *args, **kwargs)
        return _together(
            [original(s, *rank_array.own(args, k), **rank_array.own(kwargs, k)) for k, s in enumerate(streams)], f"random.{name}"
        )

    return method


def _shuffle(streams: Sequence[Any], x: Any) -> None:
    copies = []
    for stream in streams:
        order = list(range(len(x)))
        stream.shuffle(order)
        copies.append([x[k] for k in order])
    for k, row in enumerate(zip(*copies, strict=True)):
        x[k] = _together(row, "random.shuffle")


# -- NumPy's ------------------------------------------------------------------------------------------

_PlainState = np.random.RandomState
_numpy: list[Any] | None = None
"""A generator for each hosted rank, after `np.random.seed(seed + rank)`."""
_seed_plain, _set_plain = np.random.seed, np.random.set_state


def _seed_numpy(seed: Any = None) -> None:
    global _numpy
    seeds = _own_seeds(seed)
    _numpy = None if seeds is None else [_PlainState(s) for s in seeds]
    _seed_plain(rank_numbers.own(seed, 0) if seeds is None else seeds[0])


def _set_numpy(state: Any) -> None:
    global _numpy
    _numpy = None
    _set_plain(tuple(state) if isinstance(state, _States) else state)
    if isinstance(state, _States):
        _numpy = [_PlainState() for _ in state.streams]
        for stream, own in zip(_numpy, state.streams, strict=True):
            stream.set_state(own)


def _numpy_function(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if _numpy is None:
            return original(*args, **kwargs)
        if name == "get_state":
            if kwargs or args:
                return _numpy[0].get_state(*args, **kwargs)
            return join([s.get_state() for s in _numpy])
        return _of_each(_numpy, name, args, kwargs)

    return function


def _of_each(streams: Sequence[Any], name: str, args: Any, kwargs: Any) -> Any:
    if name == "shuffle" and not isinstance(args[0], rank_array.RankArray):
        orders = [s.permutation(len(args[0])) for s in streams]
        if isinstance(args[0], np.ndarray):
            rank_random.say(
                "shuffles an array in place after a seed that differs by rank: all ranks share it, and get rank 0's order. Use permutation(x)."
            )
            args[0][...] = args[0][orders[0]]
            return None
        rows = [[args[0][k] for k in order] for order in orders]
        args[0][:] = [_together(row, "shuffle") for row in zip(*rows, strict=True)]
        return None
    results = [getattr(s, name)(*rank_array.own(args, k), **rank_array.own(kwargs, k)) for k, s in enumerate(streams)]
    return _together(results, f"np.random.{name}")


def _kind_of(plain: type) -> Any:
    """A class that makes generators of a kind, also from a seed that differs by rank."""

    class Kind(type(plain)):  # type: ignore[misc]
        def __call__(cls, seed: Any = None) -> Any:
            seeds = _own_seeds(seed)
            return plain(rank_numbers.own(seed, 0)) if seeds is None else _RankGenerator([plain(s) for s in seeds])

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, plain)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, plain)

    return Kind(plain.__name__, (plain,), {"__doc__": plain.__doc__, "__module__": plain.__module__})


def _default_rng(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def default_rng(seed: Any = None) -> Any:
        seeds = _own_seeds(seed)
        return original(rank_numbers.own(seed, 0)) if seeds is None else _RankGenerator([original(s) for s in seeds])

    return default_rng


class _RankGenerator:
    """A generator of NumPy's for each hosted rank."""

    def __init__(self, streams: Sequence[Any]):
        self._streams = list(streams)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._streams[0])

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._streams[0], name)
        return functools.partial(self._draw, name) if callable(found) else found

    def _draw(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return _of_each(self._streams, name, args, kwargs)
