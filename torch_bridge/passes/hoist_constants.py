"""State that a step creates full of one number (an optimizer's moments) becomes an input of the step instead of a part of it.

Then the first step has the same graph as all later ones, and a training script compiles once instead of twice.
"""

from __future__ import annotations

from typing import Any

import jax

from torch_bridge.ir import dtypes
from torch_bridge.ir.layout import Layout
from torch_bridge.ir.segment import Fill, Renumbering, Segment
from torch_bridge.mesh import abstract_arrays, fills, places, sharding


def hoist(segment: Segment, seen: set[int]) -> None:
    """Rewrite a segment (not seen before) so that surviving, updated constants are leaves. Changes nothing if there are none.

    seen: hashes of structures that were rewritten. One that comes again creates its constants in every step, and is left as it is (so is one whose hash
    happens to be there; it only compiles once more).
    """
    fills = [f for f in segment.fills if f.born and _survives(f, segment)]
    if not fills:
        return
    structure = hash(tuple(segment.nodes))
    if structure in seen:
        return
    seen.add(structure)
    _rewrite(segment, fills)


def _survives(fill: Fill, segment: Segment) -> bool:
    storage = fill.storage()
    return storage is not None and storage.segment is segment and storage.vid >= 0 and storage.vid != fill.vid


def _rewrite(segment: Segment, fills: list[Fill]) -> None:
    """Without the nodes of these fills; what reads them reads leaves."""
    gone = {f.node for f in fills}
    leaves, leaf_of, constant_leaf = _insert_leaves(segment, fills)
    value_of: dict[int, int] = dict(constant_leaf)
    kept: list[tuple[Any, ...]] = []
    node_of: dict[int, int] = {}
    old = new = 0
    for i, node in enumerate(segment.nodes):
        n = node[0].n_outs
        if i not in gone:
            node_of[i] = len(kept)
            kept.append((node[0], *(leaf_of[v] if v < 0 else value_of[v] for v in node[1:])))
            value_of.update((old + k, new + k) for k in range(n))
            new += n
        old += n
    segment.renumber(Renumbering(kept, leaves, node_of, value_of, leaf_of))
    segment.saved[:0] = [f.storage for f in fills]
    segment.saved_leaves[:0] = [constant_leaf[f.vid] for f in fills]
    segment.fills = []


def _insert_leaves(segment: Segment, fills: list[Fill]) -> tuple[list[Any], dict[int, int], dict[int, int]]:
    """The leaves with the constants among them, where a step that finds the constants as arrays would adopt them."""
    leaves: list[Any] = []
    leaf_of: dict[int, int] = {}
    constant_leaf: dict[int, int] = {}
    pending = sorted(fills, key=lambda f: (f.leaves_before, f.node))
    for i, array in enumerate([*segment.leaves, None]):
        while pending and pending[0].leaves_before <= i:
            fill = pending.pop(0)
            leaves.append(_array(fill, segment))
            constant_leaf[fill.vid] = -len(leaves)
        if i < len(segment.leaves):
            leaves.append(array)
            leaf_of[-i - 1] = -len(leaves)
    return leaves, leaf_of, constant_leaf


def _array(fill: Fill, segment: Segment) -> jax.Array:
    of = segment.nodes[fill.node][0].outs[0]
    storage = fill.storage()
    facts = None if storage is None else storage.facts
    with places.at(None if facts is None else facts.home):
        made = _full(of, fill.value, None if facts is None else facts.start)
    if sharding.active() and not of.size:
        segment.scalars.add(id(made))
    return made


def _full(of: Layout, value: Any, start: Any) -> jax.Array:
    """One number throughout. start: how the blocks of ranks lie, None if all have the same."""
    if abstract_arrays.active():
        return abstract_arrays.constant(of.size, dtypes.to_jax(of.dtype), start)
    return fills.full(of.size, value, dtypes.to_jax(of.dtype), start)
