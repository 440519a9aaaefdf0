"""A torch function recorded in a segment of its own, and evaluated on JAX values: how decompositions are lowered and modules captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from torch_bridge.compiler import interpret
from torch_bridge.config.settings import SETTINGS
from torch_bridge.ir import dtypes
from torch_bridge.ir.graph import GraphBuilder
from torch_bridge.ir.layout import Layout, contiguous_meta, layout
from torch_bridge.ir.segment import LOCK, Segment, Storage
from torch_bridge.passes.verify import graphs
from torch_bridge.precision.precision_mode import Mode
from torch_bridge.recorder.tensor import XLATensor, make
from torch_bridge.runtime import session


class AbstractLeaf:
    """A leaf without a value."""

    __slots__ = ("layout",)

    def __init__(self, layout: Layout):
        self.layout = layout


class Place(int):
    """The index of a tensor in a flattened structure."""


@contextlib.contextmanager
def recording() -> Iterator[Segment]:
    """A segment of its own, which this thread records in for the duration; other threads wait."""
    with LOCK, session.opened(session.Session(capture=True)) as own, torch.no_grad():
        yield own.current


def abstract(segment: Segment, of: Layout) -> XLATensor:
    """A tensor without a value, as a leaf of `segment`."""
    storage = Storage(of)
    storage.vid = segment.leaf(AbstractLeaf(of))
    storage.segment = segment
    return make(of, storage)


def inline(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], key: Callable[[], Any] | None, mode: Mode) -> Any:
    """Evaluate a torch function on JAX values by recording it and lowering what it recorded."""
    flat, spec = tree_flatten((args, kwargs))
    values = []
    with recording() as segment:
        filled = []
        for x in flat:
            if hasattr(x, "dtype") and hasattr(x, "shape"):
                values.append(x)
                filled.append(abstract(segment, layout(tuple(x.shape), None, 0, dtypes.to_torch(x.dtype))))
            else:
                filled.append(x)
        targs, tkwargs = tree_unflatten(filled, spec)
        out = fn(*targs, **tkwargs)
        out_flat, out_spec = tree_flatten(out)
        vids, places = result_ids(segment, out_flat)
        graph, const = build(segment, vids)[0], constants(segment)
    results = _evaluate(graph, values, const, segment, key, mode)
    restored = [results[o] if isinstance(o, Place) else o for o in places]
    return tree_unflatten(restored, out_spec)


def result_ids(segment: Segment, outs: Sequence[Any]) -> tuple[list[int], list[Any]]:
    """The value ids of the tensors among `outs`, and `outs` with each tensor replaced by its place among them."""
    vids: list[int] = []
    places: list[Any] = []
    for o in outs:
        if isinstance(o, XLATensor):
            vids.append(segment.read(o._storage, o._layout))
            places.append(Place(len(vids) - 1))
        else:
            places.append(o)
    return vids, places


def constants(segment: Segment) -> dict[int, Any]:
    return {i: leaf for i, leaf in enumerate(segment.leaves) if not isinstance(leaf, AbstractLeaf)}


def build(segment: Segment, vids: list[int], names: dict[int, str] | None = None) -> tuple[fx.Graph, GraphBuilder]:
    builder = GraphBuilder(segment.nodes, segment.sources, vids)
    builder.inputs = [-i - 1 for i in range(len(segment.leaves))]
    metas = {}
    for i, leaf in enumerate(segment.leaves):
        is_abstract = isinstance(leaf, AbstractLeaf)
        metas[-i - 1] = contiguous_meta(
            *((leaf.layout.size, leaf.layout.dtype) if is_abstract else (leaf.shape, dtypes.to_torch(leaf.dtype)))
        )
    graph = builder.build(metas, names)
    if SETTINGS.verify:
        graphs.check(graph, segment.nodes, vids, metas, every=True)
    return graph, builder


def _evaluate(
    graph: fx.Graph, values: Sequence[Any], const: dict[int, Any], segment: Segment, key: Callable[[], Any] | None, mode: Mode
) -> Any:
    supply = iter(values)
    leaves = [const[i] if i in const else next(supply) for i in range(len(segment.leaves))]
    extras = numbers_of(graph, segment)

    def key_of(node: fx.Node) -> Any:
        from torch_bridge.lowerings import random_keys

        assert key is not None, f"{node.target} draws random numbers inside a decomposition without a key"
        return random_keys.fold_in(key(), node.meta["draw"])

    return interpret.run(graph, [*leaves, *extras], key_of, mode=mode)


def numbers_of(graph: fx.Graph, segment: Segment) -> list[Any]:
    """The packed number inputs a graph still names, as constants."""
    import numpy as np

    names = [n.target for n in graph.nodes if n.op == "placeholder"]
    flat = [v for _, values in segment.numbers for v in values]
    extras: list[Any] = []
    if "floats" in names:
        extras.append(np.array([v for v in flat if type(v) is float], dtype=np.float64))
    if "ints" in names:
        extras.append(np.array([v for v in flat if type(v) is int], dtype=np.int64))
    if "draws" in names:
        extras.append(None)
    return extras
