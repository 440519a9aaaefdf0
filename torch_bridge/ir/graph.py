"""Recorded nodes as a `torch.fx.GraphModule` of aten ops: the one IR that everything is lowered, printed and checked from.

Placeholders come first: the leaves, then `floats` and `ints` (the Python numbers that may change between steps) and `draws` (one
row of random seed and offset for every random op). Each node's `meta` has `val` (a meta tensor), `source` (`source.Source`) and, for random ops, `draw`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from torch_bridge.ir.entry import Entry, Lift, Slot
from torch_bridge.ir.layout import Layout, meta_of
from torch_bridge.source import NOWHERE, Source

aten = torch.ops.aten


KINDS = {"float": float, "int": int}
"""The Python types that lifted numbers have, by the name that graphs use."""


def number(values: torch.Tensor, index: int, kind: str) -> Any:
    """The index-th of the Python numbers that are inputs of a graph."""
    return KINDS[kind](values[index].item())


def results_of(graph: fx.Graph) -> Sequence[fx.Node]:
    """The nodes of the results of a recorded graph."""
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    return output.args[0]


def last_placeholder(graph: fx.Graph) -> fx.Node:
    """The last of a graph's inputs, behind which nodes may stand."""
    return [n for n in graph.nodes if n.op == "placeholder"][-1]


def put_after(graph: fx.Graph, after: fx.Node, target: Any, args: tuple[Any, ...], meta: Mapping[str, Any]) -> fx.Node:
    """A new node that calls an op, right behind another one."""
    with graph.inserting_after(after):
        node = graph.call_function(target, args)
    node.meta.update(meta)
    return node


class GraphBuilder:
    """Builds the fx graph of a list of nodes, or of a part of it.

    Attributes:
        outs: ids of the values that the graph gives.
        given: ids of values of nodes that are inputs of the graph: what computes them is no part of it.
        inputs: ids of what the graph takes, in order: the leaves that its results depend on, then those of `given`.
    """

    def __init__(
        self, nodes: Sequence[tuple[Any, ...]], sources: Sequence[Source], outs: Sequence[int], given: frozenset[int] = frozenset()
    ):
        self.nodes = nodes
        self.sources = sources
        self.outs = outs
        self.given = given
        self.first: list[int] = []
        at = 0
        for node in nodes:
            self.first.append(at)
            at += node[0].n_outs
        self.producer: dict[int, int] = {}
        for i, node in enumerate(nodes):
            for k in range(node[0].n_outs):
                self.producer[self.first[i] + k] = i
        self.live = self._live_nodes()
        self.inputs = self._inputs()

    def _live_nodes(self) -> list[bool]:
        live = [False] * len(self.nodes)
        stack = [self.producer[v] for v in self.outs if v >= 0 and v not in self.given]
        while stack:
            i = stack.pop()
            if not live[i]:
                live[i] = True
                stack.extend(self.producer[v] for v in self.nodes[i][1:] if v >= 0 and v not in self.given)
        return live

    def _inputs(self) -> list[int]:
        read = {v for i, node in enumerate(self.nodes) if self.live[i] for v in node[1:]}.union(self.outs)
        return [*sorted((v for v in read if v < 0), reverse=True), *sorted(v for v in read if v in self.given)]

    def build(
        self, metas: dict[int, torch.Tensor], names: dict[int, str] | None = None, slots: Mapping[type, Any] | None = None
    ) -> fx.Graph:
        """The graph (wrap it with `fx.GraphModule(torch.nn.Module(), graph)`).

        metas, names: a meta tensor for each of `inputs` by its id, and names for their placeholders ("arg0", ... where there is none).
        slots: which of the numbers share an input (`scalar_inputs.Slots` by kind; None: each has its own).
        """
        graph = fx.Graph()
        values: dict[int, fx.Node] = {}
        for k, vid in enumerate(self.inputs):
            name = (names or {}).get(vid, f"arg{k}")
            values[vid] = node = graph.placeholder(name)
            node.meta["val"] = metas[vid]
        floats, ints, draws = (graph.placeholder(n) for n in ("floats", "ints", "draws"))
        counts = {float: 0, int: 0}
        shared: dict[tuple[type, int], fx.Node] = {}
        n_draws = 0
        for i, node_key in enumerate(self.nodes):
            entry: Entry = node_key[0]
            kinds = lifted_kinds(entry)
            if not self.live[i]:
                for kind in kinds:
                    counts[kind] += 1
                n_draws += entry.rng
                continue
            numbers = []
            for kind in kinds:
                slot = counts[kind] if slots is None else int(slots[kind].slot_of[counts[kind]])
                if (kind, slot) not in shared:
                    packed: Any = (floats if kind is float else ints, slot, kind.__name__)
                    shared[kind, slot] = graph.call_function(number, packed)
                numbers.append(shared[kind, slot])
                counts[kind] += 1
            inputs = [values[v] for v in node_key[1:]]
            args, kwargs = fill((entry.args, entry.kwargs), inputs, numbers)
            node = graph.call_function(entry.op, tuple(args), kwargs)
            source = self.sources[i] if i < len(self.sources) else NOWHERE
            node.meta["source"] = source
            if source.file:
                node.meta["stack_trace"] = f'File "{source.file}", line {source.line}, in {source.function}'
            if entry.rng:
                node.meta["draw"] = n_draws
                node.meta["draw_axes"] = entry.axes
                n_draws += 1
            self._results(graph, node, entry, self.first[i], values)
        for unused in (floats, ints, draws):
            if not unused.users and not (unused is draws and n_draws):
                graph.erase_node(unused)
        graph.output(tuple(values[v] for v in self.outs))
        return graph

    def _results(self, graph: fx.Graph, node: fx.Node, entry: Entry, first: int, values: dict[int, fx.Node]) -> None:
        node.meta["vals"] = tuple(_meta(o) for o in entry.outs)
        if entry.paths == ((),):
            node.meta["val"] = node.meta["vals"][0]
        for k, path in enumerate(entry.paths):
            value = node
            for step in path:
                value = graph.call_function(operator.getitem, (value, step))
                value.meta["source"] = node.meta["source"]
            value.meta.setdefault("val", node.meta["vals"][k])
            if entry.casts and entry.casts[k] is not None:
                value.meta["converted"] = True  # so "val" has the dtype of what it is written into, not its own
                value = graph.call_function(aten._to_copy.default, (value,), {"dtype": entry.casts[k]})
                value.meta.update(source=node.meta["source"], val=node.meta["vals"][k], vals=(node.meta["vals"][k],))
            values[first + k] = value


_METAS: dict[Layout, torch.Tensor] = {}


def _meta(of: Layout | None) -> torch.Tensor | None:
    if of is None:
        return None
    found = _METAS.get(of)
    if found is None:
        found = _METAS[of] = meta_of(of)
    return found


def lifted_kinds(entry: Entry) -> list[type]:
    """The Python types of an entry's lifted numbers, in order."""
    if entry.lifted is None:
        found: list[tuple[int, type]] = []
        _walk_lifts((entry.args, entry.kwargs), found)
        entry.lifted = [kind for _, kind in sorted(found, key=lambda f: f[0])]
    return entry.lifted


def _walk_lifts(x: Any, found: list[tuple[int, type]]) -> None:
    if isinstance(x, Lift):
        found.append((x.index, x.kind))
    elif isinstance(x, (list, tuple)):
        for y in x:
            _walk_lifts(y, found)
    elif isinstance(x, dict):
        for y in x.values():
            _walk_lifts(y, found)


def fill(template: Any, inputs: Sequence[Any], numbers: Sequence[Any]) -> Any:
    """A template with its slots and lifts replaced."""
    if isinstance(template, Slot):
        return inputs[template.index]
    if isinstance(template, Lift):
        return numbers[template.index]
    if isinstance(template, tuple):
        return tuple(fill(x, inputs, numbers) for x in template)
    if isinstance(template, list):
        return [fill(x, inputs, numbers) for x in template]
    if isinstance(template, dict):
        return {k: fill(x, inputs, numbers) for k, x in template.items()}
    return template
