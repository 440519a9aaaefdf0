"""Products that each step of a Python loop over time makes with one weight, as one product of all steps.

A cell multiplies few rows in each step. Only what the next step waits for has to be done step by step, so these leave the loop (`fold_repeats`):

| recorded, for many t | becomes |
|---|---|
| `mm(x_t, w)`, `addmm(b, x_t, w)` and `embedding(w, ids_t)`, where no x_t waits for the product of another step | the t-th of `unbind` of one of all x_t |
| the sum of all `mm(g_t.T, x_t)`, the gradient of w | `mm(cat(g_t).T, cat(x_t))` |
| the sum of all `sum(g_t, 0)`, and of what LSTM and GRU cells give for their biases | `sum(cat(g_t), 0)` |
| the sum of all `embedding_dense_backward(g_t, ids_t)` | one of all g_t |

The numbers are those of other orders of the same additions. Steps of micro-batches, which do not wait for each other, keep their gradients apart: they are
there to save memory. So do steps of many rows (`ROWS`), which gain nothing.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from torch_bridge.ir.graph import last_placeholder, put_after
from torch_bridge.ir.layout import contiguous_meta
from torch_bridge.passes.find_repeats import aval, edge, list_of, plain
from torch_bridge.passes.sums import Sum, sums

aten = torch.ops.aten

ROWS = 128
"""Rows of a step, at most: larger products are as fast one by one."""
BYTES = 256 << 20
"""What the operand and the result of one product of all steps may take."""
_OWN: dict[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1, aten.embedding.default: 1}
"""Ops that are done for all steps at once, and which argument each step has of its own."""
_BIASES: dict[Any, int] = {
    (aten._thnn_fused_lstm_cell_backward_impl.default, 2): 0,
    (aten._thnn_fused_gru_cell_backward.default, 3): 0,
    (aten._thnn_fused_gru_cell_backward.default, 4): 1,
}
"""Results that are sums over the rows of another result."""


def rewrite(graph: fx.Graph, fewest: int) -> None:
    """Rewrite what at least so many steps do. The graph's results keep their shapes, dtypes and order."""
    joined = [_join_terms(graph, root, found, fewest) for root, found in list(sums(graph)) if root.users and len(found.terms) >= fewest]
    if any(joined):
        _erase_unused(graph)
    for products in _of_one_weight(graph):
        if len(products) >= fewest:
            for batch in list(_batches(products)):
                if len(batch) >= fewest:
                    _join_products(graph, batch)


def _erase_unused(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    for node in graph.nodes:
        if any(node.target is cell for cell, _ in _BIASES) and not any((node.target, user.args[1]) in _BIASES for user in node.users):
            node.args = (*node.args[:-1], False)  # nobody asks for the gradients of its biases


class _Maker:
    """Puts nodes into a graph behind one of its nodes, each behind the one before."""

    def __init__(self, graph: fx.Graph, at: fx.Node, source: Any):
        self._graph, self._at, self._said = graph, at, {"source": source}

    def __call__(self, target: Any, args: tuple[Any, ...], shape: Sequence[int], dtype: torch.dtype, kwargs: Any = None) -> fx.Node:
        val = contiguous_meta(tuple(shape), dtype)
        self._at = put_after(self._graph, self._at, target, args, {**self._said, "val": val, "vals": (val,)})
        self._at.kwargs = kwargs or {}
        return self._at

    def like(self, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
        """What a node does, with other arguments and a result of the same shape."""
        shape, dtype = aval(node)
        return self(node.target, args, shape, dtype, node.kwargs)

    def joined(self, steps: Sequence[fx.Node]) -> fx.Node:
        """What the steps have, one behind the other along the first dim."""
        (rows, *rest), dtype = aval(steps[0])
        shape = (len(steps) * rows, *rest)
        found = _entries(steps)
        return self(aten.cat.default, (list(steps), 0), shape, dtype) if found is None else self.lined(found, len(steps), 0, shape)

    def lined(self, found: tuple[fx.Node, int, int], count: int, to: int, shape: Sequence[int]) -> fx.Node:
        """Entries of a tensor, with the dim along which they lie at another place, in a shape. found: as `_entries` gives them."""
        value, dim, first = found
        sizes, dtype = list(aval(value)[0]), aval(value)[1]
        if count < sizes[dim]:
            sizes[dim] = count
            value = self(aten.slice.Tensor, (value, dim, first, first + count), sizes, dtype)
        if to != dim:
            order = list(range(len(sizes)))
            order.insert(to, order.pop(dim))
            sizes = [sizes[k] for k in order]
            value = self(aten.permute.default, (value, order), sizes, dtype)
        return value if tuple(sizes) == tuple(shape) else self(aten.reshape.default, (value, list(shape)), shape, dtype)

    def unbound(self, whole: fx.Node, steps: Sequence[fx.Node]) -> list[fx.Node]:
        """Values like those of the steps, from all of them one behind the other."""
        shape, dtype = aval(steps[0])
        apart = self(aten.reshape.default, (whole, [len(steps), *shape]), (len(steps), *shape), dtype)
        entries = self(aten.unbind.int, (apart, 0), shape, dtype)
        entries.meta["vals"] = (entries.meta.pop("val"),) * len(steps)
        return [self(operator.getitem, (entries, t), shape, dtype) for t in range(len(steps))]


def _entries(nodes: Sequence[fx.Node]) -> tuple[fx.Node, int, int] | None:
    """(tensor, dim, first place) if the nodes are neighbours in what an `unbind` gives, in order."""
    unbind = list_of(nodes)
    if unbind is None or unbind.target is not aten.unbind.int:
        return None
    first: Any = nodes[0].args[1]
    in_order = all(n.args[1] == first + t for t, n in enumerate(nodes))
    source, dim = (*unbind.args, 0)[:2]
    return (source, dim % len(aval(source)[0]), first) if in_order else None  # type: ignore[operator, return-value, arg-type]


def _bytes(nodes: Sequence[fx.Node]) -> int:
    """What it takes to put values together."""
    return 0 if _entries(nodes) is not None else sum(math.prod(n.meta["val"].shape) * n.meta["val"].dtype.itemsize for n in nodes)


# -- sums -------------------------------------------------------------------------------------------


class Term(NamedTuple):
    """A term of a sum: what is computed, and the views through which it is added. steps: what each step has of its own, rows first."""

    node: fx.Node
    views: tuple[fx.Node, ...]
    steps: tuple[fx.Node, ...]

    def kind(self) -> Any:
        """Equal for terms that may be one."""
        views = tuple((v.target, plain(v)) for v in self.views)
        result = self.node.args[0].target if self.node.target is operator.getitem else None  # type: ignore[union-attr]
        return self.node.target, plain(self.node), result, views, tuple(map(aval, self.steps))

    def of_all(self, make: _Maker, steps: Sequence[fx.Node]) -> fx.Node:
        """The term of all steps. steps: what they have of their own, put together."""
        node = self.node
        if node.target is aten.mm.default:
            turned = make(aten.permute.default, (steps[0], [1, 0]), aval(steps[0])[0][::-1], aval(steps[0])[1])
            value = make.like(node, (turned, steps[1]))
        elif node.target is operator.getitem:
            value = make(aten.sum.dim_IntList, (steps[0], [0]), *aval(node))
        else:
            value = make.like(node, (*steps, *node.args[len(steps) :]))
        for view in self.views:
            value = make.like(view, (value, *view.args[1:]))
        return value


def _term(node: fx.Node) -> Term | None:
    """A term that other steps may have, too."""
    found = edge(node)
    steps = _own(found.source)
    if steps is None or any(len(v.all_input_nodes) > 1 for v in found.views) or aval(steps[-1])[0][0] > ROWS:
        return None
    return Term(found.source, found.views, steps)


def _own(node: fx.Node) -> tuple[fx.Node, ...] | None:
    """What a term's node takes that has rows of a step."""
    args: Any = node.args
    if node.target is aten.mm.default:
        turned = args[0].target is aten.permute.default and list(args[0].args[1]) == [1, 0]
        return (args[0].args[0], args[1]) if turned else None
    if node.target is aten.sum.dim_IntList:
        return (args[0],) if list(args[1] or ()) == [0] and not node.kwargs and len(aval(args[0])[0]) > 1 else None
    if node.target is aten.embedding_dense_backward.default and not args[4]:
        return (args[0], args[1]) if aval(args[1])[0] and set(node.all_input_nodes) == {*args[:2]} else None
    if node.target is operator.getitem and isinstance(args[0], fx.Node) and (args[0].target, args[1]) in _BIASES:
        place = _BIASES[args[0].target, args[1]]
        return next(((x,) for x in args[0].users if x.target is operator.getitem and x.args[1] == place), None)
    return None


def _join_terms(graph: fx.Graph, root: fx.Node, found: Sum, fewest: int) -> bool:
    """Replace the terms of a sum that many steps give by one each; whether there were such."""
    groups: dict[Any, list[tuple[Term, fx.Node]]] = defaultdict(list)
    left: list[fx.Node] = []
    for node, _ in found.terms:
        term = _term(node)
        if term is None:
            left.append(node)
        else:
            groups[term.kind()].append((term, node))
    make = _Maker(graph, min(root.users).prev, root.meta["source"])  # not among what the last step does
    made: list[fx.Node] = []
    for group in groups.values():
        terms = sorted((term for term, _ in group), key=lambda term: _since(_root(term.steps[0])))
        columns = list(zip(*(term.steps for term in terms), strict=True))
        if len(terms) >= fewest and sum(map(_bytes, columns)) <= BYTES and all(map(_one_after_another, columns)):
            made.append(terms[0].of_all(make, [make.joined(column) for column in columns]))
        else:
            left.extend(node for _, node in group)
    if not made:
        return False
    total, *others = [*left, *made]
    for node in others:
        total = make.like(root, (total, node))
    root.replace_all_uses_with(total, lambda user: user is not total)
    return True


def _since(step: fx.Node) -> fx.Node:
    """The earliest value of a step that a value of it is made of: of a gradient, what the forward pass keeps. So all have the order of the forward pass."""
    source = edge(step).source
    while source.target is operator.getitem and source.args[0].target is not aten.unbind.int:  # type: ignore[union-attr]
        source = source.args[0]  # type: ignore[assignment]
    made = [x for x in (edge(n).source for n in source.all_input_nodes) if x.op != "placeholder"]
    return min([source, *(x for x in made if x.target is not aten.unbind.int)])


def _one_after_another(column: Sequence[fx.Node]) -> bool:
    """Whether the values of later steps depend on those of earlier ones, or are entries of one tensor, or products of such."""
    roots = list(map(_root, column))
    if list_of(roots) is not None:
        return True
    inner = roots[1:-1] if len(roots) > 3 else roots  # what the first and the last step have may come from elsewhere
    first, last = min(inner), max(inner)
    seen, ahead = {first}, [first]
    while ahead:
        for user in ahead.pop().users:
            if user is last:
                return True
            if user not in seen and user < last:
                seen.add(user)
                ahead.append(user)
    return False


def _root(node: fx.Node) -> fx.Node:
    """What a step's value is made of: through views, and products with a weight."""
    source = edge(node).source
    while source.target in _OWN:
        source = edge(source.args[_OWN[source.target]]).source  # type: ignore[arg-type]
    return source


# -- products ---------------------------------------------------------------------------------------


def _of_one_weight(graph: fx.Graph) -> list[list[fx.Node]]:
    """Ops that do the same to few rows each, all but which is one value."""
    found: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target in _OWN and (own := node.args[_OWN[node.target]]) not in _shared(node) and _few(node, own):
            shared = tuple((e.source, tuple((v.target, plain(v)) for v in e.views)) for e in map(edge, _shared(node)))
            found[node.target, plain(node), shared, aval(own), aval(node)].append(node)
    return list(found.values())


def _shared(node: fx.Node) -> list[fx.Node]:
    """What a node takes besides the rows of its own: weights, and numbers that are inputs of the program (`alpha`)."""
    args = [x for k, x in enumerate(node.args) if k != _OWN[node.target]]
    return [x for x in (*args, *node.kwargs.values()) if isinstance(x, fx.Node)]


def _few(node: fx.Node, own: Any) -> bool:
    """Whether these are few rows, which do nothing to each other."""
    if not aval(own)[0]:
        return False
    rows = math.prod(aval(own)[0]) if node.target is aten.embedding.default else aval(own)[0][0]
    biased_rows = node.target is aten.addmm.default and len(aval(node.args[0])[0]) > 1  # type: ignore[arg-type]
    return 0 < rows <= ROWS and bool(node.users) and not biased_rows


def _batches(nodes: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """Those that can be done at once: all that they take is there before any of them is used."""
    batch: dict[fx.Node, None] = {}
    used: fx.Node | None = None  # the first that uses one of them
    for node in sorted(nodes, key=_ready):
        if used is not None and (node.args[_OWN[node.target]] in batch or not _ready(node) < used):
            yield list(batch)
            batch, used = {}, None
        batch[node] = None
        used = min(node.users) if used is None else min(used, *node.users)
    yield list(batch)


def _ready(node: fx.Node) -> fx.Node:
    """The last of what a node takes."""
    return max(node.all_input_nodes)


def _behind(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The first place where nodes may stand that take this one: not among the results of a step's cell."""
    if node.op == "placeholder":
        return last_placeholder(graph)
    while node.target is operator.getitem and node.next.target is operator.getitem and node.next.args[0] is node.args[0]:
        node = node.next
    return node


def _join_products(graph: fx.Graph, batch: list[fx.Node]) -> None:
    """Do for all steps at once what they do one by one."""
    first = batch[0]
    own = _OWN[first.target]
    for user in first.users:  # in the order in which they are put together
        if user.target in _LISTS and set(user.args[0]) == set(batch) and len(user.args[0]) == len(batch):  # type: ignore[arg-type]
            batch = list(user.args[0])  # type: ignore[arg-type]
    steps: list[Any] = [node.args[own] for node in batch]
    if _bytes(steps) + _bytes(batch) > BYTES:
        return
    make = _Maker(graph, _behind(graph, max(map(_ready, batch))), first.meta["source"])
    (rows, *rest), dtype = aval(first)
    args = [*first.args[:own], make.joined(steps), *first.args[own + 1 :]]
    whole = make(first.target, tuple(args), (len(batch) * rows, *rest), dtype, first.kwargs)
    for node, entry in zip(batch, entries := make.unbound(whole, batch), strict=True):
        node.replace_all_uses_with(entry)
        graph.erase_node(node)
    for user in [user for user in entries[0].users if user.target in _LISTS]:
        _take_whole(graph, user)
    for entry in [e for e in entries if not e.users]:
        graph.erase_node(entry)


_LISTS = (aten.cat.default, aten.stack.default)


def _take_whole(graph: fx.Graph, node: fx.Node) -> None:
    """Replace entries that are put together again by the tensor that they are of."""
    (nodes, dim), (shape, _) = (*node.args, 0)[:2], aval(node)
    found = _entries(nodes)  # type: ignore[arg-type]
    if found is not None:
        make = _Maker(graph, node, node.meta["source"])
        node.replace_all_uses_with(make.lined(found, len(nodes), dim % len(shape), shape))  # type: ignore[arg-type, operator]
        graph.erase_node(node)
