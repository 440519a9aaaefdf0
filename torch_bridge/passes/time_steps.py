"""Reads of a sequence step by step, and what autograd makes of them, in a form that repeats, so that a Python loop over time becomes a loop (`fold_repeats`).

A cell that a script calls for each token reads `x[:, 0]`, `x[:, 1]`, ...: each read has a number of its own, and so has its gradient, so no step of the loop
does what the one before does.

| recorded, for many t | becomes |
|---|---|
| `select(x, dim, t)` | the t-th of `unbind(x, dim)` |
| `slice(x, dim, t * n, t * n + n)`, `slice(x, dim, t, end, n)` | the same of a view of x that has a dim for t (recorded views of views are one) |
| `select_scatter(buffer, h_t, dim, t)` one after the other (`buffer[:, t] = h`) | `stack` of all h_t; reads of other steps read the value before |
| equal views of a value | one |
| a state of zeros that the first step reads | made before it |
| `select_backward` or `slice_backward` of all g_t, added up one by one | `stack` of all g_t, zeros where a step has none |

The sum adds zeros to each g_t, so the stack has its numbers (but for the sign of zeros), and is made once instead of being added to in every step.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import fx

from torch_bridge.ir.graph import last_placeholder, put_after
from torch_bridge.ir.layout import contiguous_meta
from torch_bridge.lowerings import is_view
from torch_bridge.passes.find_repeats import plain
from torch_bridge.passes.sums import Sum, sums

aten = torch.ops.aten


class Step(NamedTuple):
    """One entry of a tensor along a dim.

    sizes: the tensor's. apart: those of the view that has a dim for the steps. dim: that dim. place: the entry's.
    """

    sizes: tuple[int, ...]
    apart: tuple[int, ...]
    dim: int
    place: int


def rewrite(graph: fx.Graph, fewest: int) -> None:
    """Rewrite what is read, or added up, in so many steps at least. The graph's results keep their shapes, dtypes and order."""
    _move_fills(graph, fewest)
    _merge_views(graph)
    _join_writes(graph, fewest)
    _join_reads(graph, fewest)
    _join_gradients(graph, fewest)


def _move_fills(graph: fx.Graph, fewest: int) -> None:
    """Move what starts a loop (a first state of zeros) to the start of the graph: where it is first read, it is in the way of the first step."""
    if not any(node.op == "placeholder" for node in graph.nodes):
        return
    equal: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is aten.full.default and not node.all_input_nodes:
            equal[plain(node)].append(node)
    for nodes in equal.values():
        for node in nodes if len(nodes) < fewest else ():  # each layer may have one of its own
            last_placeholder(graph).append(node)


def _merge_views(graph: fx.Graph) -> None:
    """Make equal views of a value one: a read through views (`x[..., a:b][:, t]`) has views of its own in each step."""
    found: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_function" and is_view(node.target):
            first = found.setdefault((node.target, plain(node), tuple(node.all_input_nodes)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


# -- writes -----------------------------------------------------------------------------------------


def _join_writes(graph: fx.Graph, fewest: int) -> None:
    """Read what is written where it comes from, and join the writes into one buffer."""
    writes = {node: step for node in graph.nodes if (step := _written(node)) is not None}
    if len(writes) < fewest:
        return
    for node in list(graph.nodes):
        step = _read(node)
        if step is not None and node.args[0] in writes:
            _read_through(graph, node, step, writes)
    for node in reversed(list(writes)):
        if not node.users:  # only reads of other steps have needed it
            graph.erase_node(node)
            del writes[node]
    ends = [node for node in writes if not (len(node.users) == 1 and _continues(next(iter(node.users)), node, writes))]
    for end in ends:
        _stack_writes(graph, end, writes, fewest)


def _written(node: fx.Node) -> Step | None:
    """The step of a value that a node replaces, if it replaces one with another of its dtype."""
    if node.target not in (aten.select_scatter.default, aten.slice_scatter.default) or node.kwargs or len(node.all_input_nodes) != 2:
        return None
    value, new, *where = node.args
    if value.meta["val"].dtype != new.meta["val"].dtype:  # type: ignore[union-attr]
        return None
    if (node.target is aten.select_scatter.default) != (len(where) == 2):  # to the end of the dim
        return None
    return _step(tuple(value.meta["val"].shape), where)  # type: ignore[union-attr]


def _continues(user: fx.Node, node: fx.Node, writes: dict[fx.Node, Step]) -> bool:
    """Whether a node writes another step into what this one gives."""
    return user in writes and user.args[0] is node and user.args[1] is not node and writes[user][:3] == writes[node][:3]


def _read_through(graph: fx.Graph, node: fx.Node, step: Step, writes: dict[fx.Node, Step]) -> None:
    """Read a step behind the writes of other steps."""
    source: Any = node.args[0]
    while source in writes and writes[source][:3] == step[:3] and writes[source].place != step.place:
        source = source.args[0]
    if source in writes and writes[source] == step:
        node.replace_all_uses_with(source.args[1])
        graph.erase_node(node)
    elif source is not node.args[0]:
        node.args = (source, *node.args[1:])


def _stack_writes(graph: fx.Graph, end: fx.Node, writes: dict[fx.Node, Step], fewest: int) -> None:
    """Replace writes of all steps of a buffer, or of most of one that is full of a number, by a stack."""
    chain = [end]
    while chain[-1].args[0] in writes and len(chain[-1].args[0].users) == 1 and _continues(chain[-1], chain[-1].args[0], writes):  # type: ignore[union-attr,arg-type]
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]
    base: Any = chain[-1].args[0]
    step = writes[end]
    entries: dict[int, Any] = {writes[node].place: node.args[1] for node in reversed(chain)}
    count = step.apart[step.dim]
    filled = base.target is aten.full.default
    if len(entries) < fewest or (len(entries) < count and not (filled and 2 * len(entries) >= count)):
        return
    _replace(graph, end, step, entries, base if filled else None, end.meta)
    for node in chain:
        graph.erase_node(node)


def _replace(graph: fx.Graph, node: fx.Node, step: Step, entries: dict[int, Any], fill: fx.Node | None, meta: dict[str, Any]) -> fx.Node:
    """Put the stack of a tensor's entries in the place of a node. fill: a `full` of what the others are."""
    sizes, apart, dim, _ = step
    val, said, at = meta["val"], {"source": meta["source"]}, node
    if len(entries) < apart[dim]:
        piece = contiguous_meta(_without(apart, dim), val.dtype)
        number = 0 if fill is None else fill.args[1]
        at = rest = put_after(graph, at, aten.full.default, (tuple(piece.shape), number), {**said, "val": piece, "vals": (piece,)})
        rest.kwargs = {"dtype": val.dtype}
        entries = dict.fromkeys(range(apart[dim]), rest) | entries
    taken = contiguous_meta(apart, val.dtype)
    whole = at = put_after(
        graph, at, aten.stack.default, ([entries[k] for k in range(apart[dim])], dim), {**said, "val": taken, "vals": (taken,)}
    )
    if apart != sizes:
        whole = put_after(graph, at, aten.reshape.default, (whole, list(sizes)), {**said, "val": val, "vals": (val,)})
    node.replace_all_uses_with(whole)
    return whole


# -- reads ------------------------------------------------------------------------------------------


def _join_reads(graph: fx.Graph, fewest: int) -> None:
    found: dict[tuple[fx.Node, Any, int], list[tuple[fx.Node, Step]]] = defaultdict(list)
    for node in graph.nodes:
        step = _read(node)
        if step is not None:
            found[node.args[0], step.apart, step.dim].append((node, step))
    for (source, *_), reads in found.items():
        if len({step.place for _, step in reads}) >= fewest:
            _unbind(graph, source, reads)


def _read(node: fx.Node) -> Step | None:
    """The step that a node reads, if it reads one."""
    if node.target not in (aten.select.int, aten.slice.Tensor) or node.kwargs or len(node.all_input_nodes) != 1:
        return None
    source, *where = node.args
    if (node.target is aten.select.int) != (len(where) == 2):  # to the end of the dim
        return None
    return _step(tuple(source.meta["val"].shape), where)  # type: ignore[union-attr]


def _step(sizes: tuple[int, ...], where: list[Any]) -> Step | None:
    """Of what `select` takes, [dim, index], or `slice`, [dim, start, end, stride]: neighbours, or every so manieth; None where it is no step."""
    if len(where) not in (2, 3, 4) or not all(isinstance(n, int) for n in (*sizes, *where)):
        return None
    dim = where[0] % len(sizes)
    size = sizes[dim]
    start, *rest = (n + size if n < 0 else n for n in where[1:])
    if not 0 <= start < size:
        return None
    if not rest:
        return Step(sizes, sizes, dim, start)
    end, stride = min(rest[0], size), (rest[1] if len(rest) > 1 else 1)
    if stride > 1:
        if size % stride or start >= stride or end <= start + size - stride:
            return None
        return Step(sizes, (*sizes[:dim], size // stride, stride, *sizes[dim + 1 :]), dim + 1, start)
    length = end - start
    if length < 1 or start % length or size % length:
        return None
    return Step(sizes, (*sizes[:dim], size // length, length, *sizes[dim + 1 :]), dim, start // length)


def _unbind(graph: fx.Graph, source: fx.Node, reads: list[tuple[fx.Node, Step]]) -> None:
    """Replace reads of a value by entries of one list, which lies where the value is made: before any loop that reads it."""
    views = _views(source)
    if views is None:
        return
    value: Any = views[0].args[0] if views else source
    at = last_placeholder(graph) if value.op == "placeholder" else value
    for view in views:
        value = at = put_after(graph, at, view.target, (value, *view.args[1:]), view.meta)
    said, dtype = {"source": reads[0][0].meta["source"]}, source.meta["val"].dtype
    sizes, apart, dim, _ = reads[0][1]
    if apart != sizes:
        val = contiguous_meta(apart, dtype)
        value = at = put_after(graph, at, aten.reshape.default, (value, list(apart)), {**said, "val": val, "vals": (val,)})
    val = contiguous_meta(_without(apart, dim), dtype)
    entries = at = put_after(graph, at, aten.unbind.int, (value, dim), {**said, "vals": (val,) * apart[dim]})
    made: dict[int, fx.Node] = {}
    for index in sorted({step.place for _, step in reads}):
        made[index] = at = put_after(graph, at, operator.getitem, (entries, index), {**said, "val": val})
    for node, step in reads:
        node.replace_all_uses_with(made[step.place])
        graph.erase_node(node)


def _without(sizes: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*sizes[:dim], *sizes[dim + 1 :])


def _views(node: fx.Node) -> list[fx.Node] | None:
    """The views through which a node reads what is computed, innermost first; None if they take more than that."""
    views: list[fx.Node] = []
    while node.op == "call_function" and is_view(node.target):
        if len(node.all_input_nodes) > 1 or node.kwargs:
            return None
        views.append(node)
        node = node.all_input_nodes[0]
    return views[::-1]


# -- gradients --------------------------------------------------------------------------------------


_GRADIENTS = (aten.select_backward.default, aten.slice_backward.default)


def _join_gradients(graph: fx.Graph, fewest: int) -> None:
    for node, found in sums(graph):
        total = _total(found)
        if total.is_of_steps(fewest):
            _stack(graph, node, total)
            for dead in (*total.sums, *dict.fromkeys(term for term, *_ in total.steps)):
                graph.erase_node(dead)
        else:
            _join_parts(graph, node, found, fewest)


class Total(NamedTuple):
    """What a sum of sums adds up.

    sums: its nodes, each before those that it adds. steps: gradients of steps, the nodes that add them, and which steps, in the order in which they are added.
    others: what else is added. straight: terms are added one by one.
    """

    sums: list[fx.Node]
    steps: list[tuple[fx.Node, fx.Node, Step]]
    others: list[fx.Node]
    straight: bool

    def is_of_steps(self, fewest: int) -> bool:
        """Whether these are steps of one tensor, most of them, and stacking them changes no order in which numbers are added."""
        found = {step.place for *_, step in self.steps}
        if len(found) < fewest or len({step[:3] for *_, step in self.steps}) > 1:
            return False
        step = self.steps[0][2]
        again = len(self.steps) > len(found)
        return 2 * len(found) >= step.apart[step.dim] and (len(self.others) <= 1 if not again else self.straight and not self.others)


def _total(found: Sum) -> Total:
    total = Total(found.adders, [], [], found.straight)
    for term, node in found.terms:
        step = _added(term) if len(term.users) == 1 else None
        if step is None:
            total.others.append(term)
        else:
            total.steps.append((term, node, step))
    return total


def _added(node: fx.Node) -> Step | None:
    """The step that a node is the gradient of, zeros elsewhere, if it is one."""
    if node.target not in _GRADIENTS or node.kwargs or len(node.all_input_nodes) != 1:
        return None
    _, sizes, *where = node.args
    return _step(tuple(sizes), where)  # type: ignore[arg-type]


def _stack(graph: fx.Graph, root: fx.Node, total: Total) -> None:
    """Replace a sum of gradients of steps by their stack, plus what else is added."""
    entries: dict[int, Any] = {}
    for term, node, step in total.steps:
        entry: Any = term.args[0]
        if step.place in entries:  # added where both are there
            with graph.inserting_before(node):
                entry = graph.call_function(aten.add.Tensor, (entries[step.place], entry))
            entry.meta.update({**node.meta, "val": term.args[0].meta["val"], "vals": (term.args[0].meta["val"],)})  # type: ignore[union-attr]
        entries[step.place] = entry
    whole = _replace(graph, root, total.steps[0][2], entries, None, root.meta)
    if total.others:
        added = put_after(graph, whole, aten.add.Tensor, (total.others[0], whole), root.meta)
        whole.replace_all_uses_with(added, lambda user: user is not added)


def _join_parts(graph: fx.Graph, root: fx.Node, found: Sum, fewest: int) -> None:
    """Join gradients of steps of parts of a value (`x[..., a:b][:, t]`): each part has a stack. No more than two numbers may be added at any place."""
    groups: dict[Any, list[tuple[fx.Node, fx.Node, Step]]] = defaultdict(list)
    others: list[fx.Node] = []
    for term, _ in found.terms:
        inner: Any = term.args[0] if term.target in _GRADIENTS and len(term.users) == 1 and len(term.all_input_nodes) == 1 else None
        step = _added(inner) if isinstance(inner, fx.Node) and len(inner.users) == 1 else None
        if step is None:
            others.append(term)
        else:
            groups[term.target, plain(term), step[:3]].append((term, inner, step))
    parts: list[list[tuple[fx.Node, fx.Node, Step]]] = []
    for group in groups.values():
        places, step = {step.place for *_, step in group}, group[0][2]
        if fewest <= len(places) == len(group) and 2 * len(places) >= step.apart[step.dim]:
            parts.append(group)
        else:
            others.extend(term for term, *_ in group)
    if not parts or _at_one_place([group[0][0] for group in parts]) + len(others) > 2:
        return
    for group in parts:
        term, last, step = max(group, key=lambda member: member[1])
        _replace(graph, last, step, {step.place: inner.args[0] for _, inner, step in group}, None, last.meta)
        others.append(term)
    total, *rest = others
    at = root
    for node in rest:
        total = at = put_after(graph, at, aten.add.Tensor, (total, node), root.meta)
    root.replace_all_uses_with(total, lambda user: user is not total)
    for dead in (*found.adders, *(term for group in parts for term, *_ in group if term not in others)):
        graph.erase_node(dead)
    for _, inner, _ in (member for group in parts for member in group):
        graph.erase_node(inner)


def _at_one_place(terms: list[fx.Node]) -> int:
    """How many of these gradients of parts have values at one place, at most."""
    ranges: list[tuple[int, int, int]] = []
    for term in terms:
        given: Any = term.args[1:]
        sizes, *where = given
        if term.target is not aten.slice_backward.default or where[3:] not in ([], [1]) or not all(isinstance(n, int) for n in where):
            return len(terms)
        dim, start, end = where[:3]
        size = sizes[dim]
        start, end = (min(max(n + size if n < 0 else n, 0), size) for n in (start, end))
        ranges.append((dim % len(sizes), start, end))
    if len({dim for dim, *_ in ranges}) > 1:
        return len(terms)
    return max(sum(start <= at < end for _, start, end in ranges) for _, at, _ in ranges)
