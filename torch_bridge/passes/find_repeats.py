"""Repeated layers in a graph: stretches of nodes that do the same again and again, each with its own weights, on the result of the one before.

A recorded step lists the forward ops layer by layer, then the backward ops layer by layer in the other order, then often the optimizer's, parameter by
parameter. Each of them is a word repeated: the same ops with the same constants and shapes, wired in the same way. A `Run` is such a stretch:
`count` iterations of `period` nodes, where each input of a node is made in the same iteration, in the one before, or outside.

Views (`lowerings.is_view`: reshape, permute, slice...) are no nodes here but ways to read a value: recording keeps the views that it has read, so the
first layer would have views that the others share with it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx

from torch_bridge.ir.graph import number
from torch_bridge.lowerings import is_view

MIN_COUNT = 3
"""Iterations that a run has at least."""
MIN_SAVED = 24
"""Nodes that a run stands for beyond those of one iteration, at least."""
_CANDIDATES = 200
"""Distances between equal nodes that are tried as periods, the most frequent ones."""
_SAME = 6
"""How often an iteration may do the same: cells of several layers of one size."""
_LISTS = 1000
"""What a node with several results counts as, where iterations are cut: it cannot be carried."""


@dataclass(frozen=True)
class Here:
    """An input made in the same iteration, by its `offset`-th node."""

    offset: int


@dataclass(frozen=True)
class Carried:
    """An input made in the iteration before, by its `offset`-th node; `first` is what the first iteration has instead."""

    offset: int
    first: fx.Node


@dataclass(frozen=True)
class Same:
    """An input from outside that all iterations share."""

    node: fx.Node


@dataclass(frozen=True)
class Each:
    """Inputs from outside, one for each iteration: of one shape and dtype, or Python numbers of one type."""

    nodes: tuple[fx.Node, ...]


Input = Here | Carried | Same | Each


@dataclass(frozen=True)
class Edge:
    """An argument of a node: a value, and the views through which it is read, outermost last."""

    source: fx.Node
    views: tuple[fx.Node, ...] = ()


def edge(node: fx.Node) -> Edge:
    """A node as what it is a view of."""
    views: list[fx.Node] = []
    while node.op == "call_function" and is_view(node.target):
        views.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return Edge(node, tuple(reversed(views)))


@dataclass(eq=False)
class Run:
    """Repeated nodes. nodes: by iteration and offset. inputs: where each node's inputs come from, by offset, in the order in which they stand in its arguments;
    views: through which views it reads them, as the first iteration has them.
    """

    nodes: list[list[fx.Node]]
    inputs: list[list[Input]]
    views: list[list[tuple[fx.Node, ...]]]
    start: int = 0
    place: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.place = {n: (t, j) for t, nodes in enumerate(self.nodes) for j, n in enumerate(nodes)}

    @property
    def count(self) -> int:
        """Iterations."""
        return len(self.nodes)

    @property
    def period(self) -> int:
        """Nodes of one iteration."""
        return len(self.nodes[0])

    def carried(self) -> list[Carried]:
        """What goes from one iteration to the next, each once."""
        return list(dict.fromkeys(x for inputs in self.inputs for x in inputs if isinstance(x, Carried)))


def edges(node: fx.Node) -> list[Edge]:
    """The nodes among a node's arguments, as often as they stand there, in order."""
    found: list[Edge] = []
    fx.node.map_arg((node.args, node.kwargs), lambda n: found.append(edge(n)))
    return found


def find(graph: fx.Graph, min_count: int = MIN_COUNT, min_saved: int = MIN_SAVED) -> list[Run]:
    """The runs of a graph, in order, no node in two of them. Those that stand for most nodes are chosen first."""
    sequence = computing(graph)
    if len(sequence) < min_count:
        return []
    position = {n: k for k, n in enumerate(sequence)}
    given = [edges(n) for n in sequence]
    inputs = [[position.get(x.source, -1) for x in row] for row in given]
    names = _names(sequence, given)
    weights = [1 if aval(n) is not None else _LISTS for n in sequence]
    taken = np.zeros(len(sequence), dtype=bool)
    runs: list[Run] = []
    for low, high, period in _stretches(names, min_count, min_saved):
        for a, b in _free(taken, low, high):
            for run in _wired(sequence, given, _turned(inputs, weights, a, b, period, min_count), period, min_count, min_saved):
                taken[run.start : run.start + run.period * run.count] = True
                runs.append(run)
    return sorted(runs, key=lambda run: run.start)


def computing(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute something, in order."""
    return [n for n in graph.nodes if n.op == "call_function" and n.target is not number and not is_view(n.target)]


# -- candidates -------------------------------------------------------------------------------------


def _names(sequence: Sequence[fx.Node], given: Sequence[list[Edge]]) -> np.ndarray:
    """A number for each node; equal numbers for nodes that do the same with inputs of the same shapes."""
    known: dict[Any, int] = {}
    return np.array([known.setdefault(_name(n, e), len(known)) for n, e in zip(sequence, given, strict=True)], dtype=np.int64)


def _name(node: fx.Node, given: list[Edge]) -> Any:
    read = tuple(tuple((v.target, plain(v), aval(v)) for v in e.views) for e in given)
    axes = node.meta.get("axes") if "draw" in node.meta else None
    return node.target, plain(node), aval(node), read, "draw" in node.meta, node.meta.get("draw_axes"), axes


def plain(node: fx.Node) -> Any:
    """A node's arguments but for other nodes; the node itself if they cannot be compared."""
    plain = fx.node.map_arg((node.args, node.kwargs), lambda n: None)
    return repr(plain) if _constant(plain) else node


_CONSTANTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _constant(x: Any) -> bool:
    """Whether `repr` tells it from everything else."""
    if isinstance(x, (list, tuple)):
        return all(map(_constant, x))
    if isinstance(x, dict):
        return all(map(_constant, x.values()))
    return isinstance(x, _CONSTANTS)


def aval(node: fx.Node) -> Any:
    """Shape and dtype of a node's value; None if it is no tensor."""
    val = node.meta.get("val")
    return (tuple(val.shape), val.dtype) if isinstance(val, torch.Tensor) else None


def list_of(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """The op in whose list of results all these nodes are; None if there is none."""
    source = nodes[0].args[0] if nodes[0].target is operator.getitem else None
    alike = isinstance(source, fx.Node) and all(n.target is operator.getitem and n.args[0] is source for n in nodes)
    return source if alike else None  # type: ignore[return-value]


def _stretches(names: np.ndarray, min_count: int, min_saved: int) -> Iterator[tuple[int, int, int]]:
    """(first, end, period) of stretches in which every node equals the one a period later, those that save most first; they may overlap."""
    order = np.argsort(names, kind="stable")
    ordered = names[order]
    distances: Counter[int] = Counter()
    for k in range(1, _SAME + 1):
        same = ordered[k:] == ordered[:-k]
        distances.update((order[k:] - order[:-k])[same].tolist())
    found: list[tuple[int, int, int, int]] = []
    for period, _ in distances.most_common(_CANDIDATES):
        equal = np.concatenate([[False], names[:-period] == names[period:], [False]]).astype(np.int8)
        edges = np.flatnonzero(np.diff(equal))
        for low, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if end - low >= max(min_saved, period * (min_count - 1)):
                found.append((end - low, -period, low, end + period))
    for _, period, low, high in sorted(found, reverse=True):
        yield low, high, -period


def _free(taken: np.ndarray, low: int, high: int) -> list[tuple[int, int]]:
    """The parts of a stretch that no run has."""
    edges = np.flatnonzero(np.diff(np.concatenate([[True], taken[low:high], [True]]).astype(np.int8)))
    return [(low + a, low + b) for a, b in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)]


def _turned(
    inputs: list[list[int]], weights: Sequence[int], low: int, high: int, period: int, min_count: int
) -> tuple[int, int, list[list[int]]]:
    """Where iterations begin: where fewest values (by weight) are carried from one to the next; (begin, iterations, inputs)."""
    if high - low < period * min_count:
        return low, 0, inputs
    last = {}
    for y in range(low, min(high, low + 3 * period)):
        for x in inputs[y]:
            if low <= x < low + 2 * period and y - x <= period:
                last[x] = y
    crossing = np.zeros(3 * period + 1, dtype=np.int64)
    for x, y in last.items():
        crossing[x + 1 - low] += weights[x]
        crossing[y + 1 - low] -= weights[x]
    carried = np.cumsum(crossing)[period : 2 * period]
    best = int(np.argmin(carried[: (high - low) % period + 1]))  # as many iterations as there are
    if carried[best] >= _LISTS:
        best = int(np.argmin(carried))
    return low + best, (high - low - best) // period, inputs


# -- wiring -----------------------------------------------------------------------------------------

OUTSIDE = 1 << 40
"""The origin of an input that is made before the first iteration."""
TOO_EARLY = -OUTSIDE
"""The origin of an input that is made more than one iteration before: no loop can carry it."""


def _wired(
    sequence: Sequence[fx.Node],
    given: Sequence[list[Edge]],
    turned: tuple[int, int, list[list[int]]],
    period: int,
    min_count: int,
    min_saved: int,
) -> Iterator[Run]:
    """The runs in a stretch: as many iterations in a row as have inputs of the same origins.

    With three nodes to an iteration, `a = f(x); b = g(a, w); x = h(b)`, iterations have the origins -1 (x of the one before), 0 (a), OUTSIDE (w) and 1 (b); the
    first has OUTSIDE for x. Where the usual origins change, a run ends and another one may begin.
    """
    begin, count, inputs = turned
    while count >= min_count and (count - 1) * period >= min_saved:
        origins = [_origins(inputs, begin, begin + t * period, period) for t in range(count)]
        usual = Counter(origins[1:]).most_common(1)[0][0]
        first = next((t for t in range(count) if origins[t] == usual or (t == 0 and _may_start(origins[0], usual))), count)
        if first > 0:
            begin, count = begin + first * period, count - first
            if first < 2 or origins[first] == usual:
                # what the iterations before made is outside now
                continue
        alike = next((t for t in range(1, count) if origins[t] != usual), count)
        if TOO_EARLY not in usual and alike >= min_count and (alike - 1) * period >= min_saved:
            run = _run(sequence, given, begin, alike, period, usual)
            if run is not None:
                yield run
        begin, count = begin + alike * period, count - alike


def _origins(inputs: list[list[int]], begin: int, at: int, period: int) -> tuple[int, ...]:
    """For each input of the iteration at a place: the number of the node that makes it, counted from there (below 0: in the iteration before), OUTSIDE or
    TOO_EARLY. begin: where the first iteration starts."""
    return tuple(OUTSIDE if x < begin else x - at if x >= at - period else TOO_EARLY for y in range(at, at + period) for x in inputs[y])


def _may_start(first: tuple[int, ...], usual: tuple[int, ...]) -> bool:
    """Whether an iteration may be the first: what the others carry comes from outside."""
    return all(a == b or (a == OUTSIDE and TOO_EARLY < b < 0) for a, b in zip(first, usual, strict=True))


def _run(
    sequence: Sequence[fx.Node], given: Sequence[list[Edge]], begin: int, count: int, period: int, origins: tuple[int, ...]
) -> Run | None:
    """The run, if its inputs and what it carries are of one shape throughout."""
    nodes = [list(sequence[begin + t * period : begin + (t + 1) * period]) for t in range(count)]
    at = 0
    inputs: list[list[Input]] = []
    for j in range(period):
        row: list[Input] = []
        for q in range(len(given[begin + j])):
            origin = origins[at]
            at += 1
            every = tuple(given[begin + t * period + j][q].source for t in range(count))
            found = _input(origin, every, nodes, period)
            if found is None:
                return None
            row.append(found)
        inputs.append(row)
    views = [[e.views for e in given[begin + j]] for j in range(period)]
    return Run(nodes, inputs, views, begin)


def _input(origin: int, every: tuple[fx.Node, ...], nodes: list[list[fx.Node]], period: int) -> Input | None:
    if origin != OUTSIDE:
        if origin >= 0:
            return Here(origin)
        made = nodes[0][origin + period]
        return Carried(origin + period, every[0]) if aval(made) is not None and aval(made) == aval(every[0]) else None
    if all(n is every[0] for n in every):
        return Same(every[0])
    if any(n.target is number for n in every):
        return Each(every) if len({n.target is number and n.args[2] for n in every}) == 1 else None
    if aval(every[0]) is None or any(aval(n) != aval(every[0]) for n in every):
        return None
    return Each(every)
