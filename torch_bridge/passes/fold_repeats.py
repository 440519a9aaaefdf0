"""How a graph with repeated layers is computed: each run of layers as one loop, its weights and what it keeps for later stacked along a new first dim.

A `Series` is a value for each iteration of a run. `Plan` finds, for every value that crosses from one part of a graph to another, in which series it is
and at which place (`Slice`):

| series | what it is |
|---|---|
| `StackedInput` | inputs of the graph that come in as one array: weights |
| `LoopOutput` | what later nodes need of a loop's iterations |
| `UpdatedStack` | what an op on lists, such as an optimizer's step, gives for a stack that it takes as one entry |
| `Recomputed` | a cast of weights, which is done again where it is needed |
| `Entries` | the entries of a tensor along a dim: the tokens of a sequence |
| `Numbers` | Python numbers that differ from step to step |
| `StackedHere` | what fits nowhere else, put together on the way |

The backward loop runs through the layers from the last to the first and stores in the order of the layers, so that its gradients lie as the weights do.

Three layers `h = tanh(h @ w)` with SGD: w0, w1 and w2 come in as one `StackedInput`. The forward loop reads its t-th place and gives the `LoopOutput` of all h.
The backward loop reads both at place 2 - t, carries the gradient of h, and stores the gradient of w at place 2 - t. The optimizer's step takes the two stacks
as one entry, and its `UpdatedStack` leaves the program in the memory of the `StackedInput`.
"""

from __future__ import annotations

import contextlib
import math
import operator
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from torch_bridge import lowerings
from torch_bridge.config.variables import VARIABLES
from torch_bridge.ir.graph import number, results_of
from torch_bridge.lowerings import Stacks
from torch_bridge.mesh import abstract_arrays
from torch_bridge.passes import find_repeats
from torch_bridge.passes.find_repeats import Carried, Each, Run, Same, aval, edge


@dataclass(eq=False)
class Series:
    """A value for each of `count` places."""

    count: int


@dataclass(eq=False)
class StackedInput(Series):
    """Placeholders of the graph, which come in as one stacked input."""

    nodes: tuple[fx.Node, ...]


@dataclass(eq=False)
class LoopOutput(Series):
    """What a run's `offset`-th nodes give, or what its iterations find carried; through views, if it is only ever read through them."""

    run: Run
    offset: int | Carried
    views: tuple[fx.Node, ...] = ()


@dataclass(eq=False)
class StackedHere(Series):
    """Values that are stacked where they are first needed."""

    nodes: tuple[fx.Node, ...]


@dataclass(eq=False)
class Numbers(StackedHere):
    """Python numbers that are inputs of the program, which are stacked where they are first needed: the `t` of `lengths > t`."""


@dataclass(eq=False)
class Entries(Series):
    """What an `unbind` takes apart."""

    node: fx.Node


@dataclass(eq=False)
class Recomputed(Series):
    """An op with one input, done anew at each place. node: how it is called, its input replaced by an element of `source` read through `views`."""

    node: fx.Node
    source: Slice
    views: tuple[fx.Node, ...]

    def under(self, ref: Slice) -> Slice:
        """Where the source of what `ref` finds in this series is found."""
        series, first, step = self.source
        return Slice(series, first + step * ref.first, step * ref.step)


@dataclass(eq=False)
class UpdatedStack(Series):
    """The `result`-th list that an op on lists gives, for one of its groups."""

    group: Group
    result: int


class Slice(NamedTuple):
    """Where a run finds its t-th value: at place `first + step * t`."""

    series: Series
    first: int
    step: int


@dataclass(eq=False)
class Group:
    """Entries of an op on lists (an optimizer's parameters) that are treated as one: their places in its lists, in the order of their series, and the stacks of
    each list with the views through which they are read."""

    node: fx.Node
    members: list[int]
    lists: list[tuple[Slice, tuple[fx.Node, ...]]]


@dataclass(eq=False)
class Piece:
    """Neighbours in a list of tensors that are put together: those of a series, or (`series` is None) one value alone."""

    nodes: tuple[fx.Node, ...]
    series: Slice | None = None
    views: tuple[fx.Node, ...] = ()


@dataclass(eq=False)
class Loop:
    """How a run is computed. refs: where its `Each` inputs are; made: the series it gives, by offset, of what it carries, and of what is read through
    views; last: offsets whose last value is needed; reverse: it stores its t-th results at place `count - 1 - t`; aside: iterations do not depend on each
    other and are done side by side.
    """

    run: Run
    refs: dict[Each, Slice] = field(default_factory=dict)
    made: dict[Any, Series] = field(default_factory=dict)
    last: dict[int, None] = field(default_factory=dict)
    reverse: bool = False
    aside: bool = False

    def place(self, t: int) -> int:
        """Where the results of iteration t are stored."""
        return self.run.count - 1 - t if self.reverse else t

    def stored(self) -> list[LoopOutput]:
        """What is stored for every iteration."""
        return [series for series in self.made.values() if isinstance(series, LoopOutput)]


aten = torch.ops.aten
JOINS = frozenset({aten.stack.default, aten.cat.default})
"""Ops that put a list of tensors together."""
LEAST = 12
"""Layers from which on they are folded."""


class _Apart(threading.local):
    """inside: whether this thread is in `apart`."""

    inside = False


_APART = _Apart()


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """A block in which this thread makes programs without loops.

    A loop copies each layer's weights out of the stack before it uses them. That is little beside a training step, and more than all else where a program
    does little with each weight, as for one token of a text.
    """
    before, _APART.inside = _APART.inside, True
    try:
        yield
    finally:
        _APART.inside = before


def least() -> int:
    """From how many repetitions on layers are folded (`NXD_JAX_FOLD`); 0: not at all.

    An abstract run folds only if it is told to: in a loop XLA for CPUs keeps weights of half precision in float32, which no accelerator does.
    """
    if _APART.inside:
        return 0
    found = VARIABLES["NXD_JAX_FOLD"].now()
    if found is None:
        return 0 if abstract_arrays.active() else LEAST
    return found


def runs(graph: fx.Graph, layers: int) -> list[Run]:
    """What is folded of a graph: if something repeats often enough, all that repeats half as often (the first and last layers' ops often differ a little)."""
    found = find_repeats.find(graph, max(layers, find_repeats.MIN_COUNT))
    return find_repeats.find(graph, max(layers // 2, find_repeats.MIN_COUNT)) if found and layers >= 2 * find_repeats.MIN_COUNT else found


Alike = Callable[[Sequence[int]], bool]
"""Whether the inputs (or results) at these places may enter (or leave) a program as one stacked array."""


def _always(places: Sequence[int]) -> bool:
    return True


class Plan:
    """A graph's parts in order: nodes, loops, and ops on lists with groups.

    updates: for inputs (by place) that the graph has a new value for, which result that is. inputs_alike, results_alike: which may be stacked.
    """

    def __init__(
        self,
        graph: fx.Graph,
        runs: Sequence[Run],
        updates: dict[int, int] | None = None,
        inputs_alike: Alike = _always,
        results_alike: Alike = _always,
    ):
        self._updates = updates or {}
        self._inputs_alike, self._results_alike = inputs_alike, results_alike
        self.place_of_input = {n: i for i, n in enumerate(n for n in graph.nodes if n.op == "placeholder")}
        self.loops = {run: Loop(run) for run in runs}
        self._loop_of = {n: loop for run, loop in self.loops.items() for n in run.place}
        self._places: dict[fx.Node, tuple[Series, int]] = {}
        self._known: dict[tuple[fx.Node, ...], Slice] = {}
        self._entries: dict[fx.Node, Entries] = {}
        self.groups: dict[fx.Node, list[Group]] = {}
        self.pieces: dict[fx.Node, list[Piece]] = {}
        self.skipped: set[fx.Node] = set()
        self.items: list[fx.Node | Loop] = []
        self.results: list[fx.Node] = list(results_of(graph))
        self._renewed = self._renewed_inputs()
        self._give_weights()
        for item in self._parts(graph):
            self.items.append(item)
            if isinstance(item, Loop):
                self._enter(item)
            elif stacks := lowerings.stacks_of(item.target):
                self._group(item, stacks)
            elif item.target in JOINS and (pieces := self._pieces(item)):
                self.pieces[item] = pieces
            else:
                self._need(e.source for e in find_repeats.edges(item))
        self.stacked = self._stacked_results()
        inside = {k for _, members in self.stacked for k in members}
        self._need(edge(n).source for k, n in enumerate(self.results) if k not in inside)

    def _renewed_inputs(self) -> dict[fx.Node, fx.Node]:
        """For results that are new values of inputs, which."""
        inputs = list(self.place_of_input)
        return {self.results[k]: inputs[i] for i, k in self._updates.items()}

    def given(self) -> list[StackedInput]:
        """Stacked inputs."""
        return list(dict.fromkeys(s for s, _ in self._places.values() if isinstance(s, StackedInput)))

    def stacked_inputs(self) -> list[tuple[int, ...]]:
        """The places of the inputs in each of `given`."""
        return [tuple(self.place_of_input[n] for n in series.nodes) for series in self.given()]

    def where(self, node: fx.Node) -> tuple[Series, int] | None:
        """The series that holds a node's value, and its place there."""
        loop = self._loop_of.get(node)
        if loop is None:
            return self._places.get(node)
        t, j = loop.run.place[node]
        series = loop.made.get(j)
        return None if series is None else (series, t if isinstance(series, Recomputed) else loop.place(t))

    # -- in order -----------------------------------------------------------------------------------

    def _parts(self, graph: fx.Graph) -> Iterable[fx.Node | Loop]:
        for node in find_repeats.computing(graph):
            loop = self._loop_of.get(node)
            if loop is None:
                yield node
            elif loop.run.nodes[0][0] is node:
                yield loop

    def _give_weights(self) -> None:
        """Inputs that runs take one by one come in stacked; the longest runs choose first."""
        for loop in sorted(self.loops.values(), key=lambda x: (-x.run.count, x.run.start)):
            for x in _each(loop.run):
                self._give(x.nodes)

    def _give(self, nodes: tuple[fx.Node, ...]) -> bool:
        fits = all(n.op == "placeholder" and n not in self._places for n in nodes) and len(set(nodes)) == len(nodes)
        if not fits or not aval(nodes[0])[0]:
            return False
        places = [self.place_of_input[n] for n in nodes]
        new = {i in self._updates for i in places}  # with some new and some old values, it would have to be stacked again for each step
        if len(new) > 1 or not self._inputs_alike(places):
            return False
        series = StackedInput(len(nodes), nodes)
        self._places.update((n, (series, k)) for k, n in enumerate(nodes))
        return True

    def _enter(self, loop: Loop) -> None:
        loop.refs = {x: self._ref(x.nodes) for x in _each(loop.run)}
        carried = loop.run.carried()
        loop.aside = not carried and all(map(_by_itself, loop.run.nodes[0]))
        steps = [ref.step for ref in loop.refs.values() if not isinstance(ref.series, Numbers)]
        loop.reverse = not loop.aside and steps.count(-1) > steps.count(1)
        self._need(x.node for inputs in loop.run.inputs for x in inputs if isinstance(x, Same))
        self._need(x.first for x in carried)

    def _need(self, nodes: Iterable[fx.Node]) -> None:
        """Values that are needed one at a time."""
        for node in nodes:
            loop = self._loop_of.get(node)
            if loop is not None:
                t, j = loop.run.place[node]
                if t == loop.run.count - 1 and j not in loop.made:
                    loop.last[j] = None
                elif j not in loop.made:
                    self._make(loop, j)

    def _make(self, loop: Loop, j: int) -> Series:
        """The series of what the run's j-th nodes give."""
        found = loop.made.get(j)
        if found is None:
            given = loop.run.inputs[j]
            count = loop.run.count
            source = given[0] if given else None
            weights = isinstance(source, Each) and all(n.op == "placeholder" for n in source.nodes)
            if lowerings.is_cast(loop.run.nodes[0][j].target) and len(given) == 1 and weights:
                assert isinstance(source, Each)
                found = Recomputed(count, loop.run.nodes[0][j], loop.refs[source], loop.run.views[j][0])
            else:
                found = LoopOutput(count, loop.run, j)
            loop.made[j] = found
        return found

    def _ref(self, nodes: tuple[fx.Node, ...]) -> Slice:
        """Where one value for each iteration is found."""
        ref = self._known.get(nodes)
        if ref is None:
            ref = self._known[nodes] = self._found(nodes) or self._stacked_input(nodes) or Slice(self._build(nodes), 0, 1)
        return ref

    def _found(self, nodes: tuple[fx.Node, ...]) -> Slice | None:
        if (taken := _taken_apart(nodes)) is not None:
            series = self._entries.setdefault(taken, Entries(len(taken.meta["vals"]), taken))
            return _regular(series, [n.args[1] for n in nodes])  # type: ignore[misc]
        loop = self._loop_of.get(nodes[1])
        if loop is not None:
            offset = loop.run.place[nodes[1]][1]
            inside = [n in loop.run.place and loop.run.place[n][1] == offset for n in nodes]
            if not all(inside):
                return self._carried(loop, offset, nodes) if inside.count(False) == 1 else None
            self._make(loop, offset)
        found = [place for n in nodes if (place := self.where(n)) is not None]
        if len(found) < len(nodes) or any(series is not found[0][0] for series, _ in found):
            return None
        return _regular(found[0][0], [place for _, place in found])

    def _carried(self, loop: Loop, offset: int, nodes: tuple[fx.Node, ...]) -> Slice | None:
        """Where one value for each iteration is what another run's iterations found carried."""
        made = loop.run.nodes
        for x in loop.run.carried():
            if x.offset != offset:
                continue
            at = {x.first: 0, **{made[t][offset]: t + 1 for t in range(loop.run.count - 1)}}
            if all(n in at for n in nodes) and (
                ref := _regular(LoopOutput(loop.run.count, loop.run, x), [loop.place(at[n]) for n in nodes])
            ):
                return ref._replace(series=loop.made.setdefault(x, ref.series))
        return None

    def _stacked_input(self, nodes: tuple[fx.Node, ...]) -> Slice | None:
        return Slice(self._places[nodes[0]][0], 0, 1) if self._give(nodes) else None

    def _build(self, nodes: tuple[fx.Node, ...]) -> Series:
        if nodes[0].target is number:
            return Numbers(len(nodes), nodes)
        self._need(nodes)
        return StackedHere(len(nodes), nodes)

    # -- lists that are put together ------------------------------------------------------------------

    def _pieces(self, node: fx.Node) -> list[Piece] | None:
        """The tensors that a `stack` or `cat` puts together, as few pieces; None if no loop gives enough of them."""
        given: Any = node.args[0]
        column = [edge(x) for x in given]
        if len({aval(x) for x in given}) > 1 or not _read_alike(column):
            return None
        found: list[Piece] = []
        at = 0
        while at < len(column):
            nodes = tuple(e.source for e in column[at : self._end(column, at)])
            if len(nodes) < find_repeats.MIN_COUNT:
                found.append(Piece((given[at],)))
                at += 1
                continue
            found.append(Piece(nodes, *self._read(column[at : at + len(nodes)])))
            at += len(nodes)
        if all(piece.series is None for piece in found):
            return None
        self._need(edge(piece.nodes[0]).source for piece in found if piece.series is None)
        return found

    def _end(self, column: Sequence[find_repeats.Edge], at: int) -> int:
        """Where the values end that one loop gives from there on, iteration by iteration, in either direction."""
        places: list[tuple[int, int]] = []
        loop = self._loop_of.get(column[at].source)
        for x in column[at:] if loop is not None and not loop.aside else ():
            found = loop.run.place.get(x.source)  # type: ignore[union-attr]
            if found is None or (places and found[1] != places[0][1]):
                break
            if len(places) > 1 and found[0] - places[-1][0] != places[1][0] - places[0][0]:
                break
            places.append(found)
        return at + len(places) if len(places) < 2 or abs(places[1][0] - places[0][0]) == 1 else at

    # -- ops on lists ---------------------------------------------------------------------------------

    def _group(self, node: fx.Node, stacks: Stacks) -> None:
        """Group the entries of an op on lists by the series that they are in."""
        lists = stacks.columns(node.args)
        picked = _picked(node, stacks)
        groups = self.groups[node] = []
        for members in self._members(node, stacks, picked[0]) if picked is not None else ():
            given = [[edge(x[k]) for k in members] for x in lists]
            if all(map(_read_alike, given)):
                groups.append(Group(node, members, [self._read(column) for column in given]))
        for group in groups:
            assert picked is not None
            for result, elements in enumerate(picked):
                updated = UpdatedStack(len(group.members), group, result)
                self._places.update((elements[k], (updated, at)) for at, k in enumerate(group.members) if k in elements)
        grouped = {k for group in groups for k in group.members}
        self._need(edge(x[k]).source for x in lists for k in range(len(x)) if k not in grouped)
        self._need(edge(x).source for x in node.args if isinstance(x, fx.Node))
        if groups:
            self.skipped.update(node.users)
            picking = node.users if stacks.replaces else ()  # the nodes that pick a list of results
            self.skipped.update(element for user in picking for element in user.users if element.target is operator.getitem)

    def _read(self, column: Sequence[find_repeats.Edge]) -> tuple[Slice, tuple[fx.Node, ...]]:
        """Where values are found, and the views through which they are still to be read: a loop stores what it gives as others read it."""
        views, nodes = column[0].views, tuple(e.source for e in column)
        loop = self._loop_of.get(nodes[0])
        if not views or loop is None or loop.aside or any(n not in loop.run.place for n in nodes):
            return self._ref(nodes), views
        times, offsets = zip(*(loop.run.place[n] for n in nodes), strict=True)
        offset, shape = offsets[0], aval(views[-1])
        if offset in loop.made or set(offsets) != {offset} or math.prod(shape[0]) > math.prod(aval(nodes[0])[0]):
            return self._ref(nodes), views
        key = (offset, tuple((v.target, find_repeats.plain(v)) for v in views))
        ref = _regular(loop.made.get(key) or LoopOutput(loop.run.count, loop.run, offset, views), [loop.place(t) for t in times])
        if ref is None:
            return self._ref(nodes), views
        loop.made[key] = ref.series
        return ref, ()

    def _members(self, node: fx.Node, stacks: Stacks, picked: dict[int, fx.Node]) -> list[list[int]]:
        """Entries that make up a series: of the stacked inputs that the results replace, or what the first list holds, or else the second (gradients of
        parameters that come one by one).

        picked: the nodes of the first list of results. Where ZeRO-1 gathers weights, the last layers' gradients may be of another series than the first
        one's; what comes in as one stack must leave as one, or it is stacked again for each step.
        """
        if stacks.when is not None and not stacks.when(node.args):
            return []
        lists: list[Sequence[fx.Node]] = stacks.columns(node.args)
        constants: Any = () if stacks.constants is None else node.args[stacks.constants]
        found: dict[Any, dict[int, int]] = defaultdict(dict)
        for k in range(len(lists[0])):
            constant = constants[k] if constants else None
            renewed = self._renewed.get(picked[k]) if k in picked else None
            sources = [edge(x[k]).source for x in lists[:2]]
            for source in sources if renewed is None else [renewed, *sources]:
                loop = self._loop_of.get(source)
                if loop is not None:
                    t, j = loop.run.place[source]
                    found[loop, j, constant].setdefault(loop.place(t), k)
                elif source in self._places:
                    series, place = self._places[source]
                    found[series, series.count, constant].setdefault(place, k)
                else:
                    continue
                break
        return [
            [at[place] for place in sorted(at)]
            for (of, *_), at in found.items()
            if len(at) == (of.run.count if isinstance(of, Loop) else of.count)
        ]

    # -- results -----------------------------------------------------------------------------------------

    def _stacked_results(self) -> list[tuple[Series, list[int]]]:
        """Results that leave as one array: (series, which result each place is)."""
        by_series: dict[Any, dict[int, int]] = defaultdict(dict)
        for k, node in enumerate(self.results):
            loop = self._loop_of.get(node)
            if loop is not None:
                t, j = loop.run.place[node]
                by_series[loop, j].setdefault(loop.place(t), k)
            elif isinstance(self._places.get(node, (None, 0))[0], UpdatedStack):
                series, place = self._places[node]
                by_series[series].setdefault(place, k)
        found = []
        for key, at in by_series.items():
            members = [at[place] for place in sorted(at)]
            count = key[0].run.count if isinstance(key, tuple) else key.count
            if len(members) < count or not aval(self.results[members[0]])[0] or not self._results_alike(members):
                continue
            series = self._make(*key) if isinstance(key, tuple) else key
            if isinstance(series, (LoopOutput, UpdatedStack)):
                found.append((series, members))
        return [*found, *self._stacked_again({k for _, members in found for k in members})]

    def _stacked_again(self, gone: set[int]) -> list[tuple[Series, list[int]]]:
        """New values of stacked inputs that come one by one, stacked for the next step. gone: results that leave in another stack."""
        found: list[tuple[Series, list[int]]] = []
        for series in self.given():
            members = [self._updates.get(self.place_of_input[n], -1) for n in series.nodes]
            if -1 in members or gone & set(members) or not self._results_alike(members):
                continue
            nodes = tuple(self.results[k] for k in members)
            self._need(edge(n).source for n in nodes)
            found.append((StackedHere(len(nodes), nodes), members))
        return found


def _regular(series: Series, places: Sequence[int]) -> Slice | None:
    """Where a run finds its values at these places of a series; None if they are not evenly spaced."""
    step = places[1] - places[0]
    return Slice(series, places[0], step) if all(p == places[0] + step * t for t, p in enumerate(places)) else None


def _taken_apart(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """The `unbind` whose entries these nodes are."""
    source = find_repeats.list_of(nodes)
    return source if source is not None and source.target is aten.unbind.int else None


def _each(run: Run) -> list[Each]:
    return list(dict.fromkeys(x for inputs in run.inputs for x in inputs if isinstance(x, Each)))


def _by_itself(node: fx.Node) -> bool:
    """Whether an op can be done for all iterations at once as it is done for one."""
    return "draw" not in node.meta and (node.target is operator.getitem or lowerings.batches(node.target))


def _read_alike(column: Sequence[find_repeats.Edge]) -> bool:
    """Whether values of one shape (no numbers) are read through the same views."""
    ways = {(aval(e.source), tuple((v.target, find_repeats.plain(v)) for v in e.views)) for e in column}
    shape = aval(column[0].source)
    return len(ways) == 1 and shape is not None and bool(shape[0])


def _picked(node: fx.Node, stacks: Stacks) -> list[dict[int, fx.Node]] | None:
    """The nodes that pick the results of an op on lists: by list (parameters, then state), and place in it. None if it is used in another way."""
    if any(user.target is not operator.getitem for user in node.users):
        return None
    if not stacks.replaces:
        return [{user.args[1]: user for user in node.users}]  # type: ignore[misc]
    found: list[dict[int, fx.Node]] = [{} for _ in range(stacks.results(node.args))]
    for user in node.users:
        if user.args[1] >= len(found) or any(element.target is not operator.getitem for element in user.users):  # type: ignore[operator]
            return None
        for element in user.users:
            found[user.args[1]][element.args[1]] = element  # type: ignore[index]
    return found
