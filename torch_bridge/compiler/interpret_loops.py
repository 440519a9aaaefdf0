"""Computing a graph as its `fold_repeats.Plan` says: loops as `lax.scan`, everything else node by node."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from torch import fx

from torch_bridge.compiler import interpret, overlapping_writes
from torch_bridge.ir import dtypes, scopes
from torch_bridge.ir.graph import KINDS, number
from torch_bridge.lowerings import Stacks, is_view, stacks_of
from torch_bridge.passes.find_repeats import Carried, Each, Here, Same, edge, edges
from torch_bridge.passes.fold_repeats import (
    Entries,
    Group,
    Loop,
    LoopOutput,
    Numbers,
    Piece,
    Plan,
    Recomputed,
    Series,
    Slice,
    StackedHere,
    UpdatedStack,
)
from torch_bridge.precision.precision_mode import Mode
from torch_bridge.source import NOWHERE


class Evaluation:
    """Values of nodes and series so far.

    inputs: by placeholder. stacks: by given series. mode: the precision of the program. draws: the rows of random seeds, if there are any.
    """

    def __init__(self, plan: Plan, graph: fx.Graph, inputs: dict[fx.Node, Any], stacks: dict[Series, Any], mode: Mode, draws: Any = None):
        self._plan = plan
        self.mode = mode
        self._values: dict[fx.Node, Any] = dict(inputs)
        self._stacks: dict[Series, Any] = dict(stacks)
        self._draws: Any = None if draws is None else jnp.asarray(draws)
        overlapping_writes.mark(graph)
        for node in graph.nodes:
            if node.target is number:
                self._values[node] = interpret.evaluate(node, [self.get(e.source) for e in edges(node)])

    def run(self) -> tuple[list[Any], list[Any]]:
        """(results that are alone, stacked results), both in the plan's order."""
        for item in self._plan.items:
            if isinstance(item, Loop):
                self._loop(item)
            elif groups := self._plan.groups.get(item):
                self._update(item, groups)
            elif pieces := self._plan.pieces.get(item):
                self._values[item] = self._joined(item, pieces)
            elif item not in self._plan.skipped:
                self._values[item] = interpret.evaluate(
                    item, (self.read(e.source, e.views) for e in edges(item)), self.key(item), mode=self.mode
                )
        inside = {k for _, members in self._plan.stacked for k in members}
        alone = [self.get(n) for k, n in enumerate(self._plan.results) if k not in inside]
        return alone, [self._stack(series) for series, _ in self._plan.stacked]

    # -- values ----------------------------------------------------------------------------------------

    def get(self, node: fx.Node) -> Any:
        """A node's value."""
        if is_view(node.target):
            found = edge(node)
            return self.read(found.source, found.views)
        if node not in self._values:
            place = self._plan.where(node)
            assert place is not None, node
            series, index = place
            if isinstance(series, Recomputed):
                source, first, step = series.source
                value: Any = self.derive(series, self._stack(source)[first + step * index])
            else:
                value = lax.index_in_dim(self._stack(series), index, 0, keepdims=False)
            self._values[node] = value
        return self._values[node]

    def read(self, source: fx.Node, views: Sequence[fx.Node]) -> Any:
        """A value through views, which are kept like other values."""
        value = None
        for k in range(len(views), 0, -1):
            if views[k - 1] in self._values:
                value = self._values[views[k - 1]]
                views = views[k:]
                break
        value = self.get(source) if value is None else value
        for view in views:
            value = self._values[view] = interpret.evaluate(view, (value,))
        return value

    def _stack(self, series: Series) -> Any:
        found = self._stacks.get(series)
        if found is None and isinstance(series, Entries):
            of, dim = edges(series.node)[0], series.node.args[1]
            found = self._stacks[series] = jnp.moveaxis(self.read(of.source, of.views), dim, 0)  # type: ignore[arg-type]
        elif found is None:
            assert isinstance(series, StackedHere), series
            values = [self.get(n).value if isinstance(series, Numbers) else self.get(n) for n in series.nodes]
            found = self._stacks[series] = jnp.stack(values)
        return found

    def derive(self, series: Recomputed, element: Any) -> Any:
        """A value that is made anew, from the element of its source."""
        return interpret.evaluate(series.node, (interpret.through(series.views, element),), mode=self.mode)

    def key(self, node: fx.Node, row: Any = None) -> Callable[[], Any]:
        """The PRNG key of a random node, from its row of seeds or another one."""

        return lambda: interpret.key_of_row(self._draws[node.meta["draw"] if row is None else row], node)

    # -- loops -----------------------------------------------------------------------------------------

    def _loop(self, loop: Loop) -> None:
        for x in (x for inputs in loop.run.inputs for x in inputs if isinstance(x, Same)):
            self.get(x.node)
        for ref in _bases(loop):
            self._stack(ref.series)
        body = _Body(self, loop)
        stored = self._side_by_side(loop, body) if loop.aside else self._scan(loop, body)
        self._stacks.update(zip(loop.stored(), stored, strict=True))

    def _scan(self, loop: Loop, body: _Body) -> list[Any]:
        """Iteration after iteration; what is stored of them."""
        run, count = loop.run, loop.run.count
        metas = [run.nodes[0][j].meta["val"] for j in body.spare]
        start = [self.get(x.first) for x in body.carried] + [jnp.zeros(tuple(v.shape), interpret.dtype_of(v)) for v in metas]

        def iteration(before: Sequence[Any], place: Any) -> tuple[list[Any], list[Any]]:
            t = count - 1 - place if loop.reverse else place
            after, kept = body(before, t, lambda ref: _at(self._stack(ref.series), ref.first + ref.step * t))
            return [interpret.strong(x) for x in after], kept

        places = jnp.arange(count, dtype=jnp.int32)
        ends, stored = lax.scan(iteration, [interpret.strong(x) for x in start], places, reverse=loop.reverse)
        offsets = [x.offset for x in body.carried] + body.spare
        self._values.update((run.nodes[-1][j], value) for j, value in zip(offsets, ends, strict=True))
        return list(stored)

    def _side_by_side(self, loop: Loop, body: _Body) -> list[Any]:
        """All iterations at once; what is stored of them."""
        refs = _bases(loop)
        lined = [_lined(self._stack(ref.series), ref, loop.run.count) for ref in refs]

        def one(t: Any, *slices: Any) -> tuple[list[Any], list[Any]]:
            return body((), t, dict(zip(refs, slices, strict=True)).__getitem__)

        ends, stored = jax.vmap(one)(jnp.arange(loop.run.count, dtype=jnp.int32), *lined)
        self._values.update((loop.run.nodes[-1][j], value[-1]) for j, value in zip(body.spare, ends, strict=True))
        return list(stored)

    # -- lists that are put together ------------------------------------------------------------------

    def _joined(self, node: fx.Node, pieces: Sequence[Piece]) -> Any:
        """What a `stack` or `cat` gives, from the stacks that loops have made."""
        found = []
        for piece in pieces:
            if piece.series is None:
                found.append(self.get(piece.nodes[0])[None])
            else:
                found.append(self._viewed(_lined(self._stack(piece.series.series), piece.series, len(piece.nodes)), piece.views))
        whole = jnp.concatenate(found)
        shape = tuple(node.meta["val"].shape)
        dim: int = node.args[1] if len(node.args) > 1 else 0  # type: ignore[assignment]
        return jnp.moveaxis(whole, 0, dim % len(shape)).reshape(shape)

    # -- ops on lists ---------------------------------------------------------------------------------

    def _update(self, node: fx.Node, groups: Sequence[Group]) -> None:
        """An op on lists, its groups as stacks."""
        stacks = stacks_of(node.target)
        assert stacks is not None, node.target
        for group in groups:
            given = [self._viewed(_lined(self._stack(ref.series), ref, len(group.members)), views) for ref, views in group.lists]
            if stacks.elementwise:
                results = [x[0] for x in self._entries(node, stacks, [[x] for x in given], group.members[:1]) if x]
            else:
                results = [self._each_row(node, stacks, given[0], group.members[0])]
            for series in self._updated(node, group):
                self._stacks[series] = results[series.result]
        grouped = {k for group in groups for k in group.members}
        columns = stacks.columns(node.args)
        single = [k for k in range(len(columns[0])) if k not in grouped]
        if not single:
            return
        found = self._entries(node, stacks, [[self.get(x[k]) for k in single] for x in columns], single)
        if stacks.replaces:
            for user in node.users:
                self._pick(user, single, found[user.args[1]])  # type: ignore[index]
        else:
            self._pick(node, single, found[0])

    def _pick(self, of: fx.Node, single: list[int], results: Sequence[Any]) -> None:
        """Note the results for entries that are in no group."""
        for element in of.users:
            if element.args[1] in single:
                self._values[element] = results[single.index(element.args[1])]  # type: ignore[arg-type]

    def _viewed(self, stack: Any, views: Sequence[fx.Node]) -> Any:
        """A stack whose elements are read through views."""
        return jax.vmap(lambda x: interpret.through(views, x))(stack) if views else stack

    def _each_row(self, node: fx.Node, stacks: Stacks, stack: Any, member: int) -> Any:
        """An op on one list, for every row of a stack: side by side if that is no more than the op does at once. member: one of their places in the list."""

        def one(x: Any) -> Any:
            return self._entries(node, stacks, [[x]], [member])[0][0]

        most: Any = math.inf if stacks.bucket is None else node.args[stacks.bucket]
        return jax.vmap(one)(stack) if stack.nbytes <= most else lax.map(one, stack)

    def _entries(self, node: fx.Node, stacks: Stacks, lists: list[list[Any]], places: list[int]) -> list[Any]:
        """An op on lists, for some of their entries: its lists of results.

        lists: the entries, for each list that is not empty. places: where they are in the lists.
        """
        supply = iter(lists)
        args: list[Any] = []
        for k, x in enumerate(node.args):
            if k in stacks.lists:
                args.append(next(supply) if x else [])
            elif k == stacks.constants:
                args.append([x[place] for place in places])  # type: ignore[index]
            else:
                args.append(fx.node.map_arg(x, self.get))
        found = self._named(node, tuple(args))
        return list(found) if stacks.replaces else [found]

    def _named(self, node: fx.Node, args: tuple[Any, ...]) -> Any:
        with jax.named_scope(scopes.name(node.meta.get("source", NOWHERE), node.target)):
            return interpret.call(node.target, args, {}, None, self.mode)

    def _updated(self, node: fx.Node, group: Group) -> set[UpdatedStack]:
        """The series that a group's results are."""
        elements = [x for user in node.users for x in (user, *user.users)]
        places = [self._plan.where(x) for x in elements]
        return {p[0] for p in places if p is not None and isinstance(p[0], UpdatedStack) and p[0].group is group}


class _Body:
    """What an iteration of a loop does. carried: what it gets from the one before; spare: other values of the last iteration that are needed."""

    def __init__(self, evaluation: Evaluation, loop: Loop):
        run = loop.run
        self._outer, self._loop = evaluation, loop
        self.carried = run.carried()
        self.spare = [j for j in loop.last if all(x.offset != j for x in self.carried)]
        draws = {j: [nodes[j].meta["draw"] for nodes in run.nodes] for j, node in enumerate(run.nodes[0]) if "draw" in node.meta}
        self._rows = {j: jnp.array(numbers, dtype=jnp.int32) for j, numbers in draws.items()}
        self._names = [_scope(first, second) for first, second in zip(*run.nodes[:2], strict=True)]
        for same in zip(*run.nodes, strict=True):  # the first stands for all
            same[0].meta[overlapping_writes.APART] = any(node.meta.get(overlapping_writes.APART) for node in same)

    def __call__(self, before: Sequence[Any], t: Any, fetch: Callable[[Slice], Any]) -> tuple[list[Any], list[Any]]:
        """(what goes on: carried and spare values; what is stored) of iteration t. before: of the one before, in order; fetch: gives elements of stacks."""
        values = _Iteration(self._outer, self._loop, dict(zip(self.carried, before, strict=False)), fetch)
        for j, node in enumerate(self._loop.run.nodes[0]):
            key = self._outer.key(node, self._rows[j][t]) if j in self._rows else None
            values.made.append(interpret.evaluate(node, values.inputs(j), key, self._names[j], mode=self._outer.mode))
        after = [values.made[j] for j in (*(x.offset for x in self.carried), *self.spare)]
        return after, [self._stored(series, values) for series in self._loop.stored()]

    def _stored(self, series: LoopOutput, values: _Iteration) -> Any:
        value = values.before[series.offset] if isinstance(series.offset, Carried) else values.made[series.offset]
        return interpret.through(series.views, value)


class _Iteration:
    """Values inside one iteration. fetch: the element of a series that is this iteration's."""

    def __init__(self, evaluation: Evaluation, loop: Loop, before: dict[Carried, Any], fetch: Callable[[Slice], Any]):
        self._outer = evaluation
        self._loop = loop
        self.before = before
        self._fetch = fetch
        self._each: dict[Slice, Any] = {}
        self._read: dict[tuple[Any, tuple[fx.Node, ...]], Any] = {}
        self.made: list[Any] = []

    def inputs(self, j: int) -> Iterator[Any]:
        """The values of the j-th node's arguments, in order."""
        run = self._loop.run
        for x, views in zip(run.inputs[j], run.views[j], strict=True):
            yield self._through(x, views)

    def _through(self, x: Any, views: tuple[fx.Node, ...]) -> Any:
        if not views:
            return self._source(x)
        found = self._read.get((x, views))
        if found is None:
            found = self._read[x, views] = interpret.evaluate(views[-1], (self._through(x, views[:-1]),))
        return found

    def _source(self, x: Any) -> Any:
        if isinstance(x, Here):
            return self.made[x.offset]
        if isinstance(x, Carried):
            return self.before[x]
        if isinstance(x, Same):
            return self._outer.get(x.node)
        assert isinstance(x, Each)
        return self._element(self._loop.refs[x])

    def _element(self, ref: Slice) -> Any:
        found = self._each.get(ref)
        if found is None:
            series = ref.series
            if isinstance(series, Recomputed):
                found = self._outer.derive(series, self._element(series.under(ref)))
            else:
                found = self._fetch(ref)
            if isinstance(series, Numbers):
                found = dtypes.Scalar(KINDS[series.nodes[0].args[2]], found)  # type: ignore[index]
            self._each[ref] = found
        return found


def _bases(loop: Loop) -> list[Slice]:
    """Which stacks a loop reads, and how."""
    found: dict[Slice, None] = {}
    for ref in loop.refs.values():
        while isinstance(ref.series, Recomputed):
            ref = ref.series.under(ref)
        found[ref] = None
    return list(found)


def _at(stack: Any, place: Any) -> Any:
    return lax.dynamic_index_in_dim(stack, place, 0, keepdims=False)


def _lined(stack: Any, ref: Slice, count: int) -> Any:
    """The stack in the order in which iterations use it."""
    if ref.first == 0 and ref.step == 1 and stack.shape[0] == count:
        return stack
    if ref.step == -1 and ref.first == stack.shape[0] - 1 == count - 1:
        return lax.rev(stack, (0,))
    return stack[jnp.array([ref.first + ref.step * t for t in range(count)])]


def _scope(first: fx.Node, second: fx.Node) -> str:
    """What an op of a loop is called in HLO metadata: its module path with a star for the number of the layer."""
    one, two = (n.meta.get("source", NOWHERE) for n in (first, second))
    return scopes.name(one._replace(module=_starred(one.module, two.module)), first.target)


def _starred(one: str, two: str) -> str:
    a, b = one.split("."), two.split(".")
    if len(a) != len(b):
        return one
    return ".".join(x if x == y or not re.fullmatch(r"\d+", x) else "*" for x, y in zip(a, b, strict=True))
