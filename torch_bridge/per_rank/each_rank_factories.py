"""What each rank makes for itself, in a process that runs the script once for several ranks: a file of its own, and the dataset or loader made from it.

`each_rank` calls a function of the script once for each rank's numbers. A `Dataset` whose constructor is given what a rank's number took out of a list
(`files[rank]`, see `rank_indexing`) is made for each rank without being asked. The first rank's object stands for all of them: a mark on it (`Each`) knows the
others' objects, and `rank_loaders` reads each rank's own.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from torch_bridge.mesh import rank_numbers, world
from torch_bridge.per_rank.host_random_states import RandomStates
from torch_bridge.recorder import rank_array, rank_tensor
from torch_bridge.script import rank_arguments, rank_indexing

MARK = "_each_rank"
"""The attribute that holds an `Each`."""

_KINDS = (DataLoader, Dataset, Sampler, BatchSampler)
_PLAIN = (bool, int, float, str, type(None))
_building = threading.local()


class Each:
    """keys: what each rank of the world made its object from. made: the objects of the other hosted ranks, by key.

    `follow` gives them the plain values (an epoch) that the script has set on the first rank's object since.
    """

    def __init__(self, first: Any, keys: Sequence[Any], made: dict[Any, Any]):
        self.keys = tuple(keys)
        self.made = made
        self._before = _plain_values(first)

    def of(self, rank: int, first: Any) -> Any:
        """A rank's own object."""
        return self.made.get(self.keys[rank], first)

    def follow(self, first: Any) -> None:
        """See above."""
        now = _plain_values(first)
        changed = {place: value for place, value in now.items() if place not in self._before or self._before[place] != value}
        self._before = now
        for other in self.made.values():
            for (part, name), value in changed.items():
                holder = getattr(other, part, None) if part else other
                if hasattr(holder, "__dict__"):
                    holder.__dict__[name] = value


def _plain_values(obj: object) -> dict[tuple[str, str], Any]:
    """Numbers and texts among the attributes of an object, and of a loader's dataset and samplers: by the part and the name."""
    parts = {part: getattr(obj, part, None) for part in ("dataset", "sampler", "batch_sampler")} if isinstance(obj, DataLoader) else {}
    return {
        (part, name): value
        for part, holder in {"": obj, **parts}.items()
        for name, value in vars_of(holder).items()
        if isinstance(value, _PLAIN)
    }


def vars_of(obj: object) -> dict[str, Any]:
    """An object's attributes, the mark left out."""
    return {name: value for name, value in getattr(obj, "__dict__", {}).items() if name != MARK}


def each_of(obj: object) -> Each | None:
    """The mark on an object, None without."""
    return getattr(obj, "__dict__", {}).get(MARK)


# -- asked for -------------------------------------------------------------------------------------


def each_rank(function: Callable[..., Any], *numbers: Any) -> Any:
    """What `function(*numbers)` gives on each rank: it is called once for each of the numbers that ranks have, with plain numbers.

    For what Python can give one rank alone, such as a file out of a list: `loader = torch_bridge.each_rank(lambda rank: make_loader(files[rank]), rank)`.
    A DataLoader, Dataset or sampler, a CPU tensor, an array, a number, or a tuple, list or dict of these comes back as one that is each rank's own. Every
    call begins with the same random states of torch, Python and NumPy; with its rank's own after a seed that differs by rank. With one rank in the
    process, as under torchrun, the function is called once.

    Raises TypeError if ranks get something else that differs.
    """
    keys = list(zip(*(rank_numbers.per_rank(x) for x in numbers), strict=True)) if numbers else [()] * world.size()
    hosted = world.current().hosted
    made = _called(lambda key: function(*key), [keys[r] for r in hosted])
    return _joined(made, keys, hosted, function)


def _called(function: Callable[[Any], Any], keys: Sequence[Any]) -> dict[Any, Any]:
    """The function's result for each distinct key, of the hosted ranks' keys; the random state is as after the first rank's call."""
    if not _is_main_thread():
        return {key: function(key) for key in dict.fromkeys(keys)}
    made: dict[Any, Any] = {}
    states = RandomStates(keys)
    states.begin()
    for key in dict.fromkeys(keys):
        with states.of(key):
            made[key] = function(key)
    states.end()
    return made


def _is_main_thread() -> bool:
    """Off it another thread may be drawing: random states are left alone."""
    return threading.current_thread() is threading.main_thread()


def _joined(made: dict[Any, Any], keys: Sequence[Any], hosted: Sequence[int], function: Callable[..., Any]) -> Any:
    """One thing that stands for what each rank got."""
    first, results = made[keys[hosted[0]]], list(made.values())
    if all(x is first for x in results) or (
        isinstance(first, (*_PLAIN, bytes)) and all(type(x) is type(first) and x == first for x in results)
    ):
        return first
    alike = all(type(x) is type(first) for x in results)
    if alike and isinstance(first, (tuple, list)) and len({len(x) for x in results}) == 1:
        parts = [_joined({key: x[k] for key, x in made.items()}, keys, hosted, function) for k in range(len(first))]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if alike and type(first) in (dict, OrderedDict) and all(x.keys() == first.keys() for x in results):
        joined = type(first)((name, _joined({key: x[name] for key, x in made.items()}, keys, hosted, function)) for name in first)
        if type(first) is OrderedDict:  # a state dict, which knows its modules' versions
            vars(joined).update(vars(first))
        return joined
    if all(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in results):
        if all(not x.dim() and x.dtype == first.dtype and torch.equal(x, first) for x in results):  # an optimizer's count of steps
            return first
        return rank_tensor.RankTensor([rank_tensor.own(made[keys[r]], place) for place, r in enumerate(hosted)])
    if all(type(x) is np.ndarray for x in results):
        return rank_array.made([made[keys[r]] for r in hosted])
    if alike and type(first) in (int, float, bool):
        return rank_numbers.ranked(tuple(made.get(key, first) for key in keys), tuple(hosted))
    if alike and isinstance(first, _KINDS):
        return mark(first, keys, made)
    kinds = ", ".join(sorted({type(x).__name__ for x in results}))
    raise TypeError(
        f"each_rank: {getattr(function, '__name__', function)} gave ranks different values of type {kinds}, which nothing can stand for. Return a DataLoader, "
        "a Dataset, a sampler, a CPU tensor, an array, a number, or a tuple, list or dict of these; or do all that needs the value within the function."
    )


def mark(first: Any, keys: Sequence[Any], made: dict[Any, Any]) -> Any:
    """Let an object stand for each rank's own; returns it."""
    first.__dict__[MARK] = Each(first, keys, {key: x for key, x in made.items() if x is not first})
    return first


# -- without being asked -----------------------------------------------------------------------------


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    """`Dataset.__new__`: if it is given what a rank's number took out of a list, the other ranks' datasets are made first."""
    create: Any = super(Dataset, cls).__new__  # type: ignore[misc]
    made: Any
    if create is object.__new__:
        if (args or kwargs) and cls.__init__ is object.__init__:  # type: ignore[misc]
            raise TypeError(f"{cls.__name__}() takes no arguments")
        made = create(cls)
    else:
        made = create(cls, *args, **kwargs)
    found = [] if getattr(_building, "now", False) else [t for x in (*args, *kwargs.values()) if (t := rank_indexing.taken(x)) is not None]
    if found and hasattr(made, "__dict__") and all(rank_arguments.is_ranks(t, sys._getframe(1)) for t in found):
        _make_others(made, cls, args, kwargs, list(zip(*(t.each for t in found), strict=True)))
    return made


def _make_others(first: Any, cls: type, args: Any, kwargs: Any, keys: Sequence[Any]) -> None:
    hosted = world.current().hosted

    def make(key: Any) -> Any:
        rank = next(r for r in hosted if keys[r] == key)
        own = [_own(x, rank) for x in args], {name: _own(x, rank) for name, x in kwargs.items()}
        try:
            return cls(*own[0], **own[1])
        except Exception as error:
            error.add_note(f"(making the {cls.__name__} of rank {rank}, from {', '.join(map(str, key))})")
            raise

    own_keys = [keys[r] for r in hosted]
    states = RandomStates(own_keys) if _is_main_thread() else None
    if states is not None:
        states.begin()
    made = {}
    with _others_are_built(states):
        for key in dict.fromkeys(own_keys[1:]):
            if key != own_keys[0]:
                with contextlib.nullcontext() if states is None else states.of(key):
                    made[key] = make(key)
    mark(first, keys, made)


@contextlib.contextmanager
def _others_are_built(states: RandomStates | None) -> Iterator[None]:
    """What is built in the block is of ranks but the first; then random states are as before."""
    _building.now = True
    try:
        yield
    finally:
        _building.now = False
        if states is not None:
            states.undo()


def _own(x: Any, rank: int) -> Any:
    found = rank_indexing.taken(x)
    return x if found is None else found.each[rank]


def install() -> None:
    """Have datasets made for each rank (`rank_loaders` reads them)."""
    Dataset.__new__ = _new  # type: ignore[method-assign]
