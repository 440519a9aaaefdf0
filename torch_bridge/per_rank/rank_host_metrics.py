"""Functions of scikit-learn's, and tables of pandas', of what differs by rank: predictions and labels of each rank, lists of losses.

`sklearn.metrics` has functions of arrays alone: each rank gets what it would get alone. Its code makes plain arrays of what it is given, which would be the
first hosted rank's. A table is made of that rank's numbers, and it is said where it goes from there to tensors. What is taken from a table by a rank's number
(`table.iloc[rank]`) is each rank's own if it is a number.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from torch_bridge.config.late_imports import when_imported
from torch_bridge.mesh import world
from torch_bridge.per_rank import rank_functions
from torch_bridge.recorder import rank_array
from torch_bridge.script import rank_branches, rank_indexing


@functools.cache
def install() -> None:
    """Once there is a number that differs by rank."""
    when_imported("sklearn.metrics", _metrics)
    when_imported("pandas", _tables)


def _metrics(module: ModuleType) -> None:
    for name in module.__all__:
        function = getattr(module, name)
        if isinstance(function, FunctionType) and name not in _OF_FUNCTIONS:
            setattr(module, name, _of_arrays(function))


_OF_FUNCTIONS = {"make_scorer", "get_scorer", "get_scorer_names", "check_scoring"}


def _of_arrays(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if not (rank_functions.hold_ranks(args) or (kwargs and rank_functions.hold_ranks(tuple(kwargs.values())))):
            return original(*args, **kwargs)
        return rank_array.on_each(original, args, kwargs)

    return function


def _tables(module: ModuleType) -> None:
    for kind in (module.Series, module.DataFrame):
        kind.__init__ = _made_of_first(kind.__init__)
    indexing = module.core.indexing
    for kind in (module.Series, module.DataFrame, indexing._LocationIndexer, indexing._ScalarAccessIndexer, indexing._AtIndexer):
        kind.__getitem__ = _taken_by_each(kind.__getitem__)
    for kind in (indexing._LocationIndexer, indexing._ScalarAccessIndexer):  # not tables, which count their references there
        kind.__setitem__ = _written_by_first(kind.__setitem__)


def _taken_by_each(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @functools.wraps(original)
    def __getitem__(self: Any, key: Any) -> Any:
        if not _is_ranks(key):
            return original(self, key)
        hosted = world.current().hosted
        first, *others = found = [original(self, rank_array.own(key, place)) for place in range(len(hosted))]
        if all(isinstance(x, (bool, int, float, np.generic)) for x in found):
            return rank_array.made(found)
        if not all(_alike(x, first) for x in others):
            rank_indexing.note_table(sys._getframe(1), "take rows", hosted)
        return first

    return __getitem__


def _written_by_first(original: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    @functools.wraps(original)
    def __setitem__(self: Any, key: Any, value: Any) -> None:
        if _is_ranks(key):
            hosted = world.current().hosted
            if len(hosted) > 1:
                rank_indexing.note_table(sys._getframe(1), "write to a table", hosted)
            key = rank_array.own(key, 0)
        original(self, key, value)

    return __setitem__


def _is_ranks(key: Any) -> bool:
    """Whether a place in a table differs by rank."""
    return rank_functions.hold_ranks((key.start, key.stop, key.step) if type(key) is slice else (key,))


def _alike(x: Any, first: Any) -> bool:
    if type(x) is not type(first):
        return False
    return bool(x.equals(first) if hasattr(first, "equals") else x == first)


def _made_of_first(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, data: Any = None, *args: Any, **kwargs: Any) -> None:
        if _holds(data):
            rank_branches.note_made(sys._getframe(1))
        original(self, data, *args, **kwargs)

    return __init__


def _holds(data: Any) -> bool:
    """Whether something that differs by rank is in lists and dicts."""
    if type(data) is dict:
        return rank_functions.hold_ranks(tuple(data.values()))
    if type(data) is list and data and type(data[0]) is dict:
        return any(map(_holds, data))
    return rank_functions.hold_ranks((data,))
