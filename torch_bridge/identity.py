"""Whether many Python objects are given ones, and who holds them: each loop runs in C, for what is asked of hundreds of parameters in every step."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import repeat
from operator import is_
from typing import Any


def all_are(values: Iterable[Any], one: Any) -> bool:
    """Whether each of the values is this object."""
    return all(map(is_, values, repeat(one)))


def any_is(values: Iterable[Any], one: Any) -> bool:
    """Whether one of the values is this object."""
    return any(map(is_, values, repeat(one)))


def same(values: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether values at the same places are the same objects, up to the end of the shorter."""
    return all(map(is_, values, others))


def references(objects: Iterable[Any]) -> Iterator[int]:
    """How many references there are to each object. Counted this way, where no variable holds it: a variable counts or not by Python's version (3.14)."""
    return map(sys.getrefcount, objects)


ONCE = next(references([object()]))
"""What `references` says of an object that only the list has which is given."""
