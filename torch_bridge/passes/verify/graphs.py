"""Rules of the fx graph of recorded nodes: it holds just the nodes that its results need, each called as it was recorded, on the same values.

The graph is read in step with the nodes it came from, and every node of it is given the id that it must have.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from torch_bridge.ir.entry import Entry, Lift, Slot
from torch_bridge.ir.graph import number
from torch_bridge.ir.layout import Layout
from torch_bridge.passes.scalar_inputs import Slots
from torch_bridge.passes.verify import report
from torch_bridge.passes.verify.segments import template

AFTER = "GraphBuilder"
EXTRAS = ("floats", "ints", "draws")
"""Placeholders after those of the leaves."""


def check(
    graph: fx.Graph,
    nodes: Sequence[tuple[Any, ...]],
    outs: Sequence[int],
    leaves: dict[int, torch.Tensor],
    slots: dict[type, Slots] | None = None,
    every: bool = False,
    given: frozenset[int] = frozenset(),
) -> None:
    """Raise `VerificationError` for the first rule that a graph of these nodes and results breaks.

    leaves: meta tensors of what it takes: the leaves that it uses, or, with `every`, all, then the values of `given` that it uses. slots: which numbers
    share an input (None: none do). given: ids of values that other programs compute.
    """
    try:
        graph.lint()
    except (RuntimeError, AttributeError) as error:
        report.fail(AFTER, "fx finds nothing wrong with the graph", str(error).splitlines()[0])
    _Walk(graph, nodes, outs, slots, given).run(leaves, every)


def needed(nodes: Sequence[tuple[Any, ...]], outs: Sequence[int], given: frozenset[int] = frozenset()) -> tuple[list[int], list[int]]:
    """The nodes that results depend on, and what they take: leaves in the order of their ids, then values of `given`."""
    wanted, taken = set(outs) - given, set(outs) & given
    last = sum(node[0].n_outs for node in nodes)
    found = []
    for i in range(len(nodes) - 1, -1, -1):
        last -= nodes[i][0].n_outs
        if any(last + k in wanted for k in range(nodes[i][0].n_outs)):
            found.append(i)
            wanted.update(v for v in nodes[i][1:] if v not in given)
            taken.update(v for v in nodes[i][1:] if v in given)
    return found[::-1], [*sorted((v for v in wanted if v < 0), reverse=True), *sorted(taken)]


class _Walk:
    """ids: the value id of every node of the graph that has one; rest: the nodes that have not been looked at."""

    def __init__(
        self, graph: fx.Graph, nodes: Sequence[tuple[Any, ...]], outs: Sequence[int], slots: dict[type, Slots] | None, given: frozenset[int]
    ):
        self.nodes, self.outs, self.slots, self.given = nodes, outs, slots, given
        self.ids: dict[fx.Node, int] = {}
        self.inputs = [n for n in graph.nodes if n.op == "placeholder"]
        self.rest: Iterator[fx.Node] = (n for n in graph.nodes if n.op != "placeholder" and n.target is not number)

    def run(self, leaves: dict[int, torch.Tensor], every: bool) -> None:
        live, used = needed(self.nodes, self.outs, self.given)
        self._placeholders([-k - 1 for k in range(max(len(leaves), -min(used, default=0)))] if every else used, leaves)
        self._live(set(live))
        output = next(self.rest, None)
        if output is None or output.op != "output":
            report.fail(AFTER, "the graph has no node that no result needs", "no output" if output is None else report.in_graph(output))
        results: Any = output.args[0]
        found = [self.ids.get(n) for n in results]
        if found != list(self.outs):
            report.fail(AFTER, "the graph gives the results in their order", f"{found} for {list(self.outs)}")

    def _placeholders(self, used: Sequence[int], leaves: dict[int, torch.Tensor]) -> None:
        names = [n.target for n in self.inputs[len(used) :]]
        if len(self.inputs) < len(used) or names != [n for n in EXTRAS if n in names]:
            shown = [str(n.target) for n in self.inputs]
            report.fail(AFTER, "the leaves in order, then floats, ints and draws are the inputs", f"{shown} for {len(used)} leaves")
        if list(leaves) != list(used):
            report.fail(AFTER, "the graph takes the leaves that its results depend on, in order", f"{list(leaves)} for {list(used)}")
        for node, leaf in zip(self.inputs, used, strict=False):
            self.ids[node] = leaf
            self._value(node, leaves[leaf].shape, leaves[leaf].dtype)

    def _live(self, live: set[int]) -> None:
        vid = draws = 0
        counts = {float: 0, int: 0}
        for i, (entry, *ids) in enumerate(self.nodes):
            kinds = template(entry)[2]
            if i in live:
                slots = []
                for k, kind in enumerate(kinds):
                    at = counts[kind] + sum(other is kind for other in kinds[:k])
                    slots.append((kind.__name__, at if self.slots is None else int(self.slots[kind].slot_of[at])))
                self._op(entry, ids, slots, draws, vid)
            for kind in kinds:
                counts[kind] += 1
            draws += entry.rng
            vid += entry.n_outs

    def _op(self, entry: Entry, ids: Sequence[int], slots: Sequence[tuple[str, int]], draw: int, first: int) -> None:
        node = next(self.rest, None)
        if node is None or node.target is not entry.op:
            found = "the end" if node is None else report.in_graph(node)
            report.fail(AFTER, "the graph has the nodes that its results need, in the order of recording", f"{found} for {entry.op}")
        self._arguments(node, entry, ids, slots)
        if node.meta.get("draw") != (draw if entry.rng else None):
            report.fail(AFTER, "a random op has its own row of draws", f"{node.meta.get('draw')} for {draw}", report.in_graph(node))
        problem = misfit(entry)
        if problem:
            report.fail(AFTER, "arguments fit the schema of their op", problem, report.in_graph(node))
        for k, path in enumerate(entry.paths):
            value = node
            for step in path:
                value = self._next(operator.getitem, (value, step), node)
            if entry.casts and entry.casts[k] is not None:
                value = self._next(torch.ops.aten._to_copy.default, (value,), node)
            self.ids[value] = first + k
            self._result(value, entry.outs[k])

    def _next(self, target: Any, args: tuple[Any, ...], of: fx.Node) -> fx.Node:
        node = next(self.rest, None)
        if node is None or node.target is not target or node.args != args:
            found = "the end" if node is None else report.in_graph(node)
            report.fail(AFTER, "a result is picked where the op returns it", f"{found} for {target}{args}", report.in_graph(of))
        return node

    def _arguments(self, node: fx.Node, entry: Entry, ids: Sequence[int], slots: Sequence[tuple[str, int]]) -> None:
        given: list[fx.Node] = []
        fx.node.map_arg((node.args, node.kwargs), given.append)
        places = template(entry)[0]
        where = report.in_graph(node)
        if len(given) != len(places):
            report.fail(AFTER, "a node has the inputs that were recorded", f"{len(given)} for {len(places)}", where)
        for place, found in zip(places, given, strict=True):
            if isinstance(place, Slot):
                if self.ids.get(found) != ids[place.index]:
                    text = f"%{found.name}, value {self.ids.get(found)}, for value {ids[place.index]}"
                    report.fail(AFTER, "a node reads the values that it was recorded on", text, where)
            elif found.target is not number or (found.args[2], found.args[1]) != slots[place.index]:
                report.fail(AFTER, "a node reads its lifted numbers from their inputs", f"{found.args[1:]} for {slots[place.index]}", where)
            elif found.args[0].target != f"{slots[place.index][0]}s":  # type: ignore[union-attr]
                report.fail(AFTER, "numbers are read from the input of their type", f"{found.args[0]} for {slots[place.index]}", where)

    def _result(self, node: fx.Node, of: Layout | None) -> None:
        if of is not None:
            self._value(node, of.size, of.dtype)
        elif node.meta.get("val") is not None:
            report.fail(AFTER, "an undefined result has no value", str(node.meta["val"]), report.in_graph(node))

    def _value(self, node: fx.Node, size: Sequence[int], dtype: torch.dtype) -> None:
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor) or (tuple(val.shape), val.dtype) != (tuple(size), dtype):
            found = f"{val.dtype}{list(val.shape)}" if isinstance(val, torch.Tensor) else repr(val)
            report.fail(
                AFTER, "a node says the shape and dtype that were recorded", f"{found} for {dtype}{list(size)}", report.in_graph(node)
            )


_NUMBERS = ("number", "float", "int", "Tensor")
"""In the types of arguments that take a number: torch's binary ops say Tensor."""


@functools.lru_cache(maxsize=8192)
def misfit(entry: Entry) -> str:
    """What of an entry's arguments does not fit its op's schema, "" if all do."""
    schema = entry.op._schema
    by_name = {a.name: a for a in schema.arguments}
    positional = [a for a in schema.arguments if not a.kwarg_only]
    if len(entry.args) > len(positional):
        return f"{len(entry.args)} positional arguments for {len(positional)}"
    unknown = [name for name in entry.kwargs if name not in by_name]
    if unknown:
        return f"no argument is called {unknown[0]}"
    given = [*zip(positional, entry.args, strict=False), *((by_name[k], v) for k, v in entry.kwargs.items())]
    for argument, value in given:
        kind = str(argument.type)
        for x in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(x, Slot) and "Tensor" not in kind:
                return f"a tensor for {argument.name}, which is {kind}"
            if isinstance(x, Lift) and not any(word in kind for word in _NUMBERS):
                return f"a number for {argument.name}, which is {kind}"
    return ""
