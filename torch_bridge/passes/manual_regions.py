"""Which values of an annotated program are one block for each device: those between `enter_region` and `leave_region` (`recorder.manual_regions`).

What an op makes of a block is a block. Ops on blocks are done on every device with its own; what comes from outside is whole on each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from torch_bridge.ir.segment import Results, Segment
from torch_bridge.mesh.spmd_mode import MODE

ENTER, LEAVE = "torch_bridge.enter_region.default", "torch_bridge.leave_region.default"

LOST = (
    "this xla tensor belongs to a region of manual sharding: every device has a block of its own, which lives until the step ends, or a value is asked for. "
    "Give it to xs.disable_manual_sharding(t, partition_spec, full_shape) before that, and read the tensor that comes back"
)


def values(nodes: Sequence[tuple[Any, ...]]) -> set[int]:
    """Ids of the values that are blocks."""
    found: set[int] = set()
    first = 0
    for entry, *ids in nodes:
        if _is_block(str(entry.op), not found.isdisjoint(ids)):
            found.update(range(first, first + entry.n_outs))
        first += entry.n_outs
    return found


def nodes_of(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes of a graph whose results are blocks."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and _is_block(str(node.target), any(n in found for n in node.all_input_nodes)):
            found.add(node)
    return frozenset(found)


def _is_block(op: str, reads_one: bool) -> bool:
    return op != LEAVE and (reads_one or op == ENTER)


def drop(segment: Segment, live: Results) -> None:
    """Take blocks out of what a segment that is about to run is to compute for storages: there they are lost.

    Raises RuntimeError for a block that was written into a tensor from outside.
    """
    if not MODE.regions:
        return
    kept = {id(storage) for ref in segment.saved for storage in [ref()] if storage is not None}
    for vid in values(segment.nodes).intersection(live):
        if any(id(storage) in kept for storage in live[vid]):
            raise RuntimeError(
                "a tensor from outside of a region of manual sharding was updated with what a device computed inside (its own block): compute a new tensor "
                "in the region, and give it to xs.disable_manual_sharding. A parameter that is used in a region goes in through xs.enable_manual_sharding, "
                "which adds up its gradient over the devices"
            )
        live.drop(vid)
        segment.lost = LOST
