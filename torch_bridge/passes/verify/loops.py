"""Rules of a plan of loops: each part finds every value that it reads, made by then, and a series holds at each place the value that it stands for.

The plan is followed as `interpret_loops` evaluates it, with names of values instead of values.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from torch_bridge.ir.graph import number
from torch_bridge.lowerings import is_view, stacks_of
from torch_bridge.passes.find_repeats import Carried, Each, Same, aval
from torch_bridge.passes.fold_repeats import (
    Entries,
    Group,
    Loop,
    LoopOutput,
    Piece,
    Plan,
    Recomputed,
    Series,
    Slice,
    StackedHere,
    StackedInput,
    UpdatedStack,
)
from torch_bridge.passes.verify import report
from torch_bridge.passes.verify.repeats import read, through, what

AFTER = "fold_repeats"
Name = tuple[Any, tuple[Any, ...]]
"""A value: the node that makes it (of an op on lists: with the list and the place in it), and the views through which it is read."""


def check(plan: Plan, graph: fx.Graph) -> None:
    """Raise `VerificationError` for the first rule that a plan of a graph breaks."""
    _Walk(plan, graph).run()


class _Walk:
    """made: nodes whose values are there; stacks: series that are there; derived: the run and offset of what is done anew."""

    def __init__(self, plan: Plan, graph: fx.Graph):
        self.plan, self.graph = plan, graph
        given = plan.given()
        stacked = {n for series in given for n in series.nodes}
        self.made: set[fx.Node] = {n for n in graph.nodes if n.target is number or (n.op == "placeholder" and n not in stacked)}
        self.stacks: set[Series] = set(given)
        self.derived = {s: (loop, j) for loop in plan.loops.values() for j, s in loop.made.items() if isinstance(s, Recomputed)}
        self.todo = [n for n in graph.nodes if n.op == "call_function" and n.target is not number and not is_view(n.target)]

    def run(self) -> None:
        self._given()
        left = set(self.todo)
        for item in self.plan.items:
            nodes = [n for nodes in item.run.nodes for n in nodes] if isinstance(item, Loop) else [item]
            if not left.issuperset(nodes):
                report.fail(AFTER, "every node is computed once", "it is computed again", report.in_graph(nodes[0]))
            left.difference_update(nodes)
            if isinstance(item, Loop):
                self._loop(item)
            elif self.plan.groups.get(item):
                self._lists(item, self.plan.groups[item])
            elif item in self.plan.pieces:
                self._pieces(item, self.plan.pieces[item])
                self.made.add(item)
            elif item not in self.plan.skipped:
                self._get([source for source, _ in read(item)], item)
                self.made.add(item)
        if left:
            report.fail(AFTER, "every node is computed once", f"{len(left)} are not", report.in_graph(min(left, key=self.todo.index)))
        self._results()

    def _given(self) -> None:
        nodes = [n for series in self.plan.given() for n in series.nodes]
        if len(set(nodes)) < len(nodes) or any(n.op != "placeholder" for n in nodes):
            report.fail(AFTER, "an input comes in alone or in one stack", str(nodes[:10]))
        for series in self.plan.given():
            if len(series.nodes) != series.count or len({aval(n) for n in series.nodes}) > 1:
                report.fail(AFTER, "the inputs in a stack have one shape and dtype", str(series.nodes[:10]))

    # -- values ----------------------------------------------------------------------------------------

    def _get(self, nodes: Sequence[fx.Node], reader: fx.Node) -> None:
        """Values are there one at a time, or in a series."""
        for node in nodes:
            source = through(node)[0]
            if source in self.made:
                continue
            place = self.plan.where(source)
            if place is None:
                report.fail(AFTER, "a loop gives every value that is read after it", f"%{source.name} is lost", report.in_graph(reader))
            series, index = place
            self._stack(series, reader)
            if self._name(series, index, reader) != (named(source), ()):
                text = f"%{self._name(series, index, reader)[0]} where %{source.name} should be"
                report.fail(AFTER, "a series holds at each place the value that it stands for", text, report.in_graph(reader))
            self.made.add(source)

    def _stack(self, series: Series, reader: fx.Node) -> None:
        if isinstance(series, Recomputed):
            self._stack(series.source.series, reader)
        elif isinstance(series, Entries):
            self._get([source for source, _ in read(series.node)], reader)
        elif series not in self.stacks:
            if not isinstance(series, StackedHere):
                report.fail(
                    AFTER, "a series is made before it is read", f"{type(series).__name__} of {series.count}", report.in_graph(reader)
                )
            self._get(series.nodes, reader)
            self.stacks.add(series)

    def _name(self, series: Series, place: int, reader: fx.Node) -> Name:
        """The value at a place of a series."""
        if not 0 <= place < series.count:
            report.fail(AFTER, "places lie in their series", f"place {place} of {series.count}", report.in_graph(reader))
        if isinstance(series, (StackedInput, StackedHere)):
            return _whole(series.nodes[place])
        if isinstance(series, Entries):
            return (series.node, 0, place), ()
        if isinstance(series, UpdatedStack):
            return (series.group.node, series.result, series.group.members[place]), ()
        if isinstance(series, Recomputed):
            loop, j = self.derived[series]
            node = loop.run.nodes[place][j]
            self._done_again(series, node, place)
            return named(node), ()
        assert isinstance(series, LoopOutput)
        loop = self.plan.loops[series.run]
        t = series.run.count - 1 - place if loop.reverse else place
        return named(_made(series, t)), tuple(map(_view, series.views))

    def _done_again(self, series: Recomputed, node: fx.Node, place: int) -> None:
        source, first, step = series.source
        given = self._name(source, first + step * place, node)
        wanted = [(named(n), tuple(map(_view, views))) for n, views in read(node)]
        if what(series.node) != what(node) or [(given[0], (*given[1], *map(_view, series.views)))] != wanted:
            report.fail(AFTER, "what is done anew is done on the same value", f"{given} for {wanted}", report.in_graph(node))

    def _ref(self, ref: Slice, wanted: Sequence[Name], views: Sequence[fx.Node], reader: fx.Node) -> None:
        """`ref` finds these values, one for each iteration."""
        self._stack(ref.series, reader)
        for t, name in enumerate(wanted):
            found = self._name(ref.series, ref.first + ref.step * t, reader)
            if (found[0], (*found[1], *map(_view, views))) != name:
                text = f"{found[0]} for {name[0]} in iteration {t}"
                report.fail(AFTER, "a loop reads in each iteration the value that is meant", text, report.in_graph(reader))

    # -- parts -----------------------------------------------------------------------------------------

    def _loop(self, loop: Loop) -> None:
        run, first = loop.run, loop.run.nodes[0][0]
        inputs = dict.fromkeys(x for row in run.inputs for x in row)
        self._get([x.node for x in inputs if isinstance(x, Same)], first)
        carried = [x for x in inputs if isinstance(x, Carried)]
        if loop.aside and carried:
            report.fail(AFTER, "iterations side by side do not depend on each other", str(carried[0]), report.in_graph(first))
        self._get([x.first for x in carried], first)
        for x in inputs:
            if isinstance(x, Each):
                if x not in loop.refs:
                    report.fail(AFTER, "a loop knows where its inputs are", str(x.nodes[0]), report.in_graph(first))
                self._ref(loop.refs[x], [(named(n), ()) for n in x.nodes], (), first)
        for key, series in loop.made.items():
            offset = series.offset if isinstance(series, LoopOutput) else self.derived[series][1]  # type: ignore[index]
            if series.count != run.count or offset != (key[0] if isinstance(key, tuple) else key):
                report.fail(AFTER, "a loop stores a value of every iteration", f"{series.count} of {run.count}", report.in_graph(first))
        self.stacks.update(loop.stored())
        self.made.update(run.nodes[-1][j] for j in (*(x.offset for x in carried), *loop.last))

    def _lists(self, node: fx.Node, groups: Sequence[Group]) -> None:
        stacks = stacks_of(node.target)
        assert stacks is not None, node.target
        lists = stacks.columns(node.args)
        members = [k for group in groups for k in group.members]
        if len(set(members)) < len(members) or not set(members) <= set(range(len(lists[0]))):
            report.fail(AFTER, "an entry of an op on lists is in one group", str(members[:20]), report.in_graph(node))
        for group in groups:
            for x, (ref, views) in zip(lists, group.lists, strict=True):
                given = [through(x[k]) for k in group.members]
                self._ref(ref, [(named(n), tuple(map(_view, v))) for n, v in given], views, node)
            for x in node.args:
                plain = isinstance(x, (list, tuple)) and len(x) == len(lists[0]) and not any(isinstance(y, fx.Node) for y in x)
                values = [x[k] for k in group.members] if plain else []  # type: ignore[index]
                if len(set(values)) > 1:
                    report.fail(AFTER, "the entries of a group are treated alike", str(values), report.in_graph(node))
        single = [k for k in range(len(lists[0])) if k not in members]
        self._get([x[k] for x in lists for k in single] + [x for x in node.args if isinstance(x, fx.Node)], node)
        for element in (e for user in node.users for e in (user, *user.users)):
            name = named(element)
            if isinstance(name, tuple) and name[0] is node and name[2] in single:
                self.made.add(element)
            place = self.plan.where(element)
            if place is not None and isinstance(place[0], UpdatedStack):
                self.stacks.add(place[0])

    def _pieces(self, node: fx.Node, pieces: Sequence[Piece]) -> None:
        entries: Any = node.args[0]
        given, at = [through(x) for x in entries], 0
        for piece in pieces:
            count = len(piece.nodes)
            if piece.series is None:
                self._get(piece.nodes, node)
                same = count == 1 and through(piece.nodes[0]) == given[at]
            else:
                self._ref(piece.series, [(named(n), tuple(map(_view, v))) for n, v in given[at : at + count]], piece.views, node)
                same = True
            if not same or len({aval(x) for x in entries}) > 1:
                report.fail(
                    AFTER, "a list is put together from its entries, of one shape, in order", str(piece.nodes[:3]), report.in_graph(node)
                )
            at += count
        if at != len(given):
            report.fail(AFTER, "a list is put together from all its entries", f"{at} of {len(given)}", report.in_graph(node))

    def _results(self) -> None:
        results, output = self.plan.results, next(n for n in reversed(self.graph.nodes) if n.op == "output")
        if results != list(output.args[0]):
            report.fail(AFTER, "a plan gives the graph's results", f"{len(results)} of {len(output.args[0])}")
        inside: set[int] = set()
        for series, members in self.plan.stacked:
            if inside.intersection(members) or len(members) != series.count or len({aval(results[k]) for k in members}) > 1:
                report.fail(AFTER, "a result leaves once, beside others of its shape", f"results {members} as a stack of {series.count}")
            inside.update(members)
            self._ref(Slice(series, 0, 1), [_whole(results[k]) for k in members], (), output)
        self._get([n for k, n in enumerate(results) if k not in inside], output)


def named(node: fx.Node) -> Any:
    """A node, or what an op on lists returns at a place: (op, list, place)."""
    if node.target is not operator.getitem:
        return node
    source: Any = node.args[0]
    if source.target is operator.getitem:
        return source.args[0], source.args[1], node.args[1]
    return source, 0, node.args[1]


def _whole(node: fx.Node) -> Name:
    source, views = through(node)
    return (named(node), ()) if not views else (named(source), tuple(map(_view, views)))


def _made(series: LoopOutput, t: int) -> fx.Node:
    if not isinstance(series.offset, Carried):
        return series.run.nodes[t][series.offset]
    return series.run.nodes[t - 1][series.offset.offset] if t else series.offset.first


def _view(node: fx.Node) -> Any:
    return what(node)[:2]
