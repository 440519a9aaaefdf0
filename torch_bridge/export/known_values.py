"""Values in a graph that is captured: those that follow from constants alone. The rest has none.

`spatial_shapes.tolist()` of shapes that were put beside the inputs, and what a cache keeps of an earlier capture.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from torch_bridge import _compat, lowerings
from torch_bridge.compiler import interpret
from torch_bridge.ir import dtypes
from torch_bridge.ir.graph import GraphBuilder
from torch_bridge.ir.layout import contiguous_meta
from torch_bridge.ir.segment import Storage
from torch_bridge.mesh import sharding
from torch_bridge.recorder.subgraph import AbstractLeaf, numbers_of


def settle(storage: Storage) -> bool:
    """Give a storage its value. False if that is none of constants which all ranks have: inputs, weights, random numbers or other ranks are behind it."""
    segment = storage.segment
    builder = GraphBuilder(segment.nodes, segment.sources, [storage.vid])
    leaves = {vid: segment.leaves[-vid - 1] for vid in builder.inputs}
    ops = [node[0] for node, live in zip(segment.nodes, builder.live, strict=True) if live]
    if not all(map(_is_plain, leaves.values())) or any(op.rng or lowerings.is_collective(op.op) for op in ops):
        return False
    graph = builder.build({vid: contiguous_meta(leaf.shape, dtypes.to_torch(leaf.dtype)) for vid, leaf in leaves.items()})
    with _compat.enable_x64():
        (value,) = interpret.run(graph, [*leaves.values(), *numbers_of(graph, segment)], _no_key)
    storage.settle(value)
    return True


def _is_plain(leaf: Any) -> bool:
    """Whether a leaf is a constant that all ranks have."""
    return not isinstance(leaf, AbstractLeaf) and not (sharding.active() and sharding.axes_of(sharding.spec_of(leaf)))


def _no_key(node: fx.Node) -> Any:
    raise AssertionError(f"{node.target} draws random numbers")
