"""Ranks to groups: which ranks share tensors, batches, stages, sequences and experts.

Two layouts:

- "contiguous": ranks in order fill a grid [pp, dp, cp, tp], so a tp group is a run of neighbouring ranks. It is the layout of the meshes.
- "nxd": the layout that NxD 0.18 picks for the hardware. It differs from "contiguous" in two cases, both of which give dp groups
  that are wired together: tp 4 on whole trn1 nodes (every n/4-th rank of a node: one core from each row of chips), and tp of half a Trn2 node
  (first and last row of chips; the two rows between).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from nxd_jax.topology.topology import Topology

KINDS = ("tp", "dp", "pp", "cp", "ep", "edp")
LAYOUTS = ("contiguous", "nxd")

Groups = dict[str, list[list[int]]]
"""Lists of ranks by kind of group: "tp", "dp", "pp", "cp", "ep" (expert parallel) and "edp" (expert data parallel)."""

_AXES = ("pp", "dp", "cp", "tp")
_EXPERT_AXES = ("pp", "edp", "ep", "tp")


def sizes(world: int, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, dp: int | None = None) -> dict[str, int]:
    """All parallel sizes of a world of `world` ranks: dp = world / (tp * pp * cp), and edp = world / (tp * pp * ep).

    Raises ValueError for a size below 1, for sizes that do not divide the world, and for a `dp` other than the implied one.
    """
    given = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
    low = {name: size for name, size in given.items() if size < 1}
    if low:
        raise ValueError(f"parallel sizes are at least 1, got {low}")
    if world % (tp * pp * cp):
        raise ValueError(
            f"invalid implied data parallel degree: {world} cores / (tp {tp} * pp {pp} * cp {cp} = {tp * pp * cp}) is not a whole number; change "
            "the parallel sizes, or the number of cores (NEURON_RT_NUM_CORES, NXD_JAX_INSTANCE, NXD_JAX_NNODES)"
        )
    if world % (tp * pp * ep):
        raise ValueError(
            f"invalid implied expert data parallel degree: {world} cores / (tp {tp} * pp {pp} * ep {ep} = {tp * pp * ep}) is not a whole number; "
            "ep has to divide dp * cp"
        )
    implied = world // (tp * pp * cp)
    if dp is not None and dp != implied:
        raise ValueError(
            f"dp={dp} is given, but {world} cores / (tp {tp} * pp {pp} * cp {cp}) make dp={implied}; leave dp out or change a size"
        )
    return {**given, "dp": implied, "edp": world // (tp * pp * ep)}


def rank_order(topology: Topology, tp: int, layout: str = "contiguous") -> np.ndarray:
    """The ranks in the order in which they fill the grids [pp, dp, cp, tp] and, for experts, [pp, edp, ep, tp]: an integer array of shape [cores].

    (NxD refuses expert parallelism with its strided tp 4 groups.)
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not known; use one of {', '.join(LAYOUTS)}")
    ranks = np.arange(topology.core_count)
    if layout == "contiguous" or (quarters := _quarters(topology, tp)) is None:
        return ranks
    nodes = ranks.reshape(topology.node_count, 4, -1)
    if quarters == "rows":  # rows 0 and 3 of each node, then rows 1 and 2
        return nodes[:, [0, 3, 1, 2]].reshape(-1)
    return nodes.transpose(0, 2, 1).reshape(-1)


def _quarters(topology: Topology, tp: int) -> str | None:
    """How NxD rearranges the quarters (rows of chips) of a node for this tp: "strided", "rows" or not at all."""
    target, per_node = topology.platform_target, topology.cores_per_node
    if target == "trn1" and tp == 4 and per_node % 4 == 0:
        return "strided" if per_node > 4 else None
    if target == "trn2" and (topology.lnc, tp) in ((1, 64), (2, 32)) and per_node == 2 * tp:
        return "rows"
    return None


def rearranged(topology: Topology, tp: int, layout: str) -> bool:
    """Whether the layout gives other groups than "contiguous" here."""
    return layout != "contiguous" and _quarters(topology, tp) is not None


def groups(
    topology: Topology, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, dp: int | None = None, layout: str = "contiguous"
) -> Groups:
    """The ranks of every group, by kind, in NxD's orders.

    The order of the groups of a kind runs over the other axes: tp over (pp, dp, cp), dp over (pp, cp, tp), pp over (dp, cp, tp), cp over
    (pp, dp, tp), ep over (pp, edp, tp), edp over (pp, ep, tp). Expert groups see the same ranks as a grid [pp, edp, ep, tp].

    Raises ValueError as `sizes` does.
    """
    size = sizes(topology.core_count, tp, pp, cp, ep, dp)
    order = rank_order(topology, tp, layout)
    dense = order.reshape([size[a] for a in _AXES])
    expert = order.reshape([size[a] for a in _EXPERT_AXES])
    return {kind: _lines(dense, _AXES.index(kind)) if kind in _AXES else _lines(expert, _EXPERT_AXES.index(kind)) for kind in KINDS}


def informative(groups: Groups) -> tuple[str, ...]:
    """The kinds whose groups have several ranks; "edp" only where there are experts to tell it from dp."""
    return tuple(kind for kind in KINDS if len(groups[kind][0]) > 1 and (kind != "edp" or len(groups["ep"][0]) > 1))


def _lines(grid: np.ndarray, axis: int) -> list[list[int]]:
    """Every line of the grid along an axis, in row-major order of the other axes."""
    lines: list[list[int]] = np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis]).tolist()
    assert len(lines) * grid.shape[axis] == prod(grid.shape)
    return lines
