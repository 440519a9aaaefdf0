"""Small integer values that Python asks for, computed on the host without cutting the graph.

Model code often branches on a few integers it has just made (`if (mask == 1).all()`, `position_ids[0, -1].item()`). Where such a value depends only on a
handful of small integer or bool tensors whose leaves are at hand, eager torch computes exactly the same number at once, and the segment stays whole.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_bridge import dtypes, metrics, sharding
from torch_bridge.graph import fill
from torch_bridge.segment import Entry, Segment

aten = torch.ops.aten

MAX_NODES = 64
MAX_ELEMENTS = 1 << 16
SEARCH = 400
"""How many nodes back the value's inputs may lie."""
EXACT = 256
"""Whole numbers up to here are the same in float32 and in every lower precision."""

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def evaluate(segment: Segment, vid: int) -> torch.Tensor | None:
    """The value of a pending integer or bool result as a CPU tensor, or None if it takes the device to know it.

    Who watches the segment is told, as of any value that Python asks for; if no leaf has a part in it, with the place of the first node that has (plus 1).
    """
    cone = _cone(segment, vid)
    if cone is None:
        return None
    values: dict[int, torch.Tensor] = {}
    for index, first in cone:
        entry, *inputs = segment.nodes[index]
        for v in inputs:
            if v < 0 and v not in values:
                leaf = _leaf(segment.leaves[-v - 1])
                if leaf is None:
                    return None
                values[v] = leaf
        numbers = next((n for i, n in segment.numbers if i == index), ())
        args, kwargs = fill((entry.args, entry.kwargs), [values[v] for v in inputs], numbers)
        out = entry.op(*args, **kwargs)
        for k, path in enumerate(entry.paths):
            value = out
            for step in path:
                value = value[step]
            cast = entry.casts[k] if entry.casts else None
            values[first + k] = value if cast is None else value.to(cast)
    metrics.count("host::small_integers")
    if segment.watch is not None:
        segment.watch(None, None, 0 if min(values) < 0 else 1 + cone[0][0])
    return values[vid]


def _cone(segment: Segment, vid: int) -> list[tuple[int, int]] | None:
    """(node index, id of its first result) of everything `vid` depends on, in order; None if it is not small and integer."""
    needed = {vid}
    cone: list[tuple[int, int]] = []
    at = segment.next_vid
    for index in range(len(segment.nodes) - 1, max(-1, len(segment.nodes) - SEARCH - 1), -1):
        node = segment.nodes[index]
        entry = node[0]
        at -= entry.n_outs
        if needed.isdisjoint(range(at, at + entry.n_outs)):
            continue
        if not _cheap(entry) or len(cone) == MAX_NODES:
            return None
        needed.difference_update(range(at, at + entry.n_outs))
        needed.update(v for v in node[1:] if v >= 0)
        cone.append((index, at))
        if not needed:
            return cone[::-1]
    return None


def _cheap(entry: Entry) -> bool:
    return (
        not entry.rng
        and entry.op.namespace == "aten"
        and all(o is not None and (o.dtype in _INTEGERS or _whole(entry)) and o.numel <= MAX_ELEMENTS for o in entry.outs)
    )


def _whole(entry: Entry) -> bool:
    """True for a constant like `torch.ones(2, 3)`, a mask in the making: the same number in every floating-point dtype and precision mode."""
    if entry.op is not aten.full.default or type(entry.args[1]) not in (int, float):
        return False
    return abs(entry.args[1]) <= EXACT and entry.args[1] == int(entry.args[1])


def _leaf(array: Any) -> torch.Tensor | None:
    from torch_bridge.transfer import to_cpu

    if not hasattr(array, "is_ready"):  # a captured module's input has no value
        return None
    if array.size > MAX_ELEMENTS or dtypes.to_torch(array.dtype) not in _INTEGERS or not array.is_ready():
        return None
    if sharding.active() and sharding.axes_of(sharding.spec_of(array)):  # ranks may disagree
        return None
    return to_cpu(array)
