"""A hint, once, for a loop whose tensors grow by one each time: the same ops are compiled again for every length, as by a key-value cache that grows."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch_bridge import source

logger = logging.getLogger("torch_bridge")

TIMES = 3
"""Compilations in a row, each for one more than the one before, after the first, from which on it is no coincidence."""

LEAST = 10
"""Ops that a program has at least: small ones compile fast."""

_KEPT = 64
_said = False


class _Seen(NamedTuple):
    """The shapes that a structure was compiled for last, and how often in a row they had grown."""

    shapes: tuple[tuple[int, ...], ...]
    times: int


_seen: OrderedDict[int, _Seen] = OrderedDict()
"""By the ops of a program."""


def look(nodes: Sequence[Any], sources: Sequence[source.Source], shapes: tuple[tuple[int, ...], ...]) -> None:
    """A program of these ops is about to be compiled for arrays of these shapes."""
    if _said or len(nodes) < LEAST or not any(s.module_class for s in sources):
        return
    key = hash(tuple(id(node[0].op) for node in nodes))
    before = _seen.pop(key, None)
    grown = None if before is None else _grown(before.shapes, shapes)
    times = 0 if before is None or grown is None else before.times + 1
    _seen[key] = _Seen(shapes, times)
    while len(_seen) > _KEPT:
        _seen.popitem(last=False)
    if grown is not None and times >= TIMES:
        _say(len(nodes), times + 1, grown)


def _grown(before: Sequence[tuple[int, ...]], after: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The largest shape that has one more along one dim; None unless that is how all those differ that do."""
    if len(before) != len(after):
        return None
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    if not changed or not all(
        len(a) == len(b) and sorted(y - x for x, y in zip(a, b, strict=True))[-2:] in ([0, 1], [1]) for a, b in changed
    ):
        return None
    if any(sum(b) - sum(a) != 1 for a, b in changed):
        return None
    return max((b for _, b in changed), key=len)


def _say(ops: int, times: int, shape: tuple[int, ...]) -> None:
    global _said
    _said = True
    logger.warning(
        "%s: the same %d ops were compiled %d times in a row, each time for one element more (now %s), and will be for every length. Keep shapes fixed: pad to "
        'one of a few lengths; for transformers\' generate() use cache_implementation="static" and end graphs before and after the model (model.'
        "register_forward_pre_hook and register_forward_hook with lambda *_: torch_xla.sync()).",
        source.script_line() or "a loop",
        ops,
        times,
        list(shape),
    )
