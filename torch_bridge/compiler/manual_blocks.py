"""Ops on the blocks of a region of manual sharding (`passes.manual_regions`), on all devices at once.

A block of shape S is kept as an array of shape [devices, *S], of which each device has its row: an op is a `shard_map` of its lowering over the rows.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec
from torch import fx

from torch_bridge.compiler import interpret
from torch_bridge.ir import dtypes
from torch_bridge.mesh import spmd
from torch_bridge.passes import manual_regions
from torch_bridge.precision.precision_mode import Mode
from torch_bridge.source import NOWHERE


class Blocks:
    """inside: the nodes of a graph whose results are blocks."""

    def __init__(self, graph: fx.Graph):
        self.inside = manual_regions.nodes_of(graph)
        for node in self.inside:
            if "draw" in node.meta:
                raise NotImplementedError(
                    f"{node.target} at {node.meta.get('source', NOWHERE).where} draws random numbers in a region of manual sharding, where each device would "
                    "need its own: draw them outside, and give them to xs.enable_manual_sharding"
                )

    def has(self, node: fx.Node) -> bool:
        """Whether a node computes a block, or reads one."""
        return node in self.inside or any(n in self.inside for n in node.all_input_nodes)

    def evaluate(self, node: fx.Node, given: Sequence[Any], mode: Mode) -> Any:
        """A node's result. given: the values of the nodes among its arguments, as often as they stand there, in order."""
        if node.target is operator.getitem:
            return given[0][node.args[1]]
        if str(node.target) in (manual_regions.ENTER, manual_regions.LEAVE):
            return interpret.call(node.target, (given[0], *node.args[1:]), {}, None, mode)
        read: list[fx.Node] = []
        fx.node.map_arg((node.args, node.kwargs), read.append)
        kinds = [x.kind if isinstance(x, dtypes.Scalar) else None for x in given]
        arrays = [x.value if isinstance(x, dtypes.Scalar) else x for x in given]
        rows = [n in self.inside for n in read]

        def own(*parts: Any) -> Any:
            blocks = [_row(x) if row else x for x, row in zip(parts, rows, strict=True)]
            values = [x if kind is None else dtypes.Scalar(kind, x) for x, kind in zip(blocks, kinds, strict=True)]
            return jax.tree.map(lambda x: x[None], interpret.evaluate(node, values, mode=mode))

        each = PartitionSpec(tuple(spmd.mesh().axis_names))
        specs = tuple(each if row else PartitionSpec() for row in rows)
        return jax.shard_map(own, mesh=spmd.mesh(), in_specs=specs, out_specs=each, check_vma=False)(*arrays)


def _row(x: Any) -> Any:
    return jax.tree.map(lambda part: part[0], x)
