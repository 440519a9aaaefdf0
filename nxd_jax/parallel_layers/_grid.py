"""The grid of ranks behind `parallel_state`: group lists in NxD's orders, and mesh axes whose lines the groups are."""

from __future__ import annotations

import os

import numpy as np

KINDS = ("tp", "dp", "pp", "cp", "ep", "edp")
_DENSE = ("pp", "dp", "cp", "tp")
_EXPERT = ("pp", "edp", "ep", "tp")


class Grid:
    """Ranks in a grid.

    size: ranks in a group of each kind. grid: ranks by [pp, dp, cp, tp]. lists: groups by kind. axes: mesh axes (name to size, outermost first), so
    chosen that as many kinds as possible are lines of the mesh.
    """

    def __init__(self, world: int, tp: int, pp: int, cp: int, ep: int, lnc: int = 1, local_size: int | None = None):
        if world % (tp * pp * cp):
            raise RuntimeError(
                f"invalid implied data parallel degree: {world} ranks / (tensor_model_parallel_size {tp} * pipeline_model_parallel_size {pp} * "
                f"context_parallel_size {cp}) is not a whole number; change a size or the number of ranks"
            )
        if world % (tp * pp * ep):
            raise RuntimeError(
                f"invalid implied expert data parallel degree: {world} ranks / (tensor_model_parallel_size {tp} * pipeline_model_parallel_size {pp} "
                f"* expert_model_parallel_size {ep}) is not a whole number; expert_model_parallel_size must divide {world // (tp * pp)}"
            )
        self.size = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp": world // (tp * pp * cp), "edp": world // (tp * pp * ep)}
        order = _order(world, tp, ep, lnc, local_size or world)
        self.grid = order.reshape([self.size[a] for a in _DENSE])
        expert = order.reshape([self.size[a] for a in _EXPERT])
        self.lists = {
            kind: _lines(self.grid, _DENSE.index(kind)) if kind in _DENSE else _lines(expert, _EXPERT.index(kind)) for kind in KINDS
        }
        self.axes = self._axes(order, local_size or world)

    def _axes(self, order: np.ndarray, local_size: int) -> dict[str, int]:
        size = self.size
        if (order != np.arange(order.size)).any():
            strided = order[1] - order[0] > 1
            if strided and size["pp"] == size["cp"] == 1:  # tp 4 over a trn1 node: every quarter of a node holds one rank of each group
                return {"pp": 1, "node": order.size // local_size, "tp": size["tp"], "cp": 1, "dp": local_size // size["tp"]}
            return {"pp": 1, "dp": order.size, "cp": 1, "tp": 1}
        cp, ep, both = size["cp"], size["ep"], size["dp"] * size["cp"]
        if ep == 1 or (cp > 1 and cp % ep and ep % cp):
            return {"pp": size["pp"], "dp": size["dp"], "cp": cp, "tp": size["tp"]}
        if cp % ep == 0:
            return {"pp": size["pp"], "dp": size["dp"], "cp": cp // ep, "ep": ep, "tp": size["tp"]}
        return {"pp": size["pp"], "dp": both // ep, "ep": ep // cp, "cp": cp, "tp": size["tp"]}

    def place(self, kind: str, rank: int) -> int:
        """A rank's place in its group of a kind."""
        return next(group.index(rank) for group in self.lists[kind] if rank in group)


def _order(world: int, tp: int, ep: int, lnc: int, local_size: int) -> np.ndarray:
    """Ranks in the order in which they fill the grid: NxD rearranges them on an emulated instance where the hardware wants it."""
    if os.environ.get("NXD_JAX_INSTANCE"):
        from nxd_jax.topology import Topology, layouts

        topology = Topology.from_environment()
        if topology.core_count == world:
            return np.asarray(layouts.rank_order(topology, tp, "nxd", ep))
    return np.arange(world)


def _lines(grid: np.ndarray, axis: int) -> list[list[int]]:
    found: list[list[int]] = np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis]).tolist()
    return found
