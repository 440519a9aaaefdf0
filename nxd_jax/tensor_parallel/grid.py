"""The grid of ranks behind `parallel_groups`: group lists in NxD's orders, and mesh axes whose lines the groups are."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

KINDS = ("tp", "dp", "pp", "cp", "ep", "edp")
_DENSE = ("pp", "dp", "cp", "tp")
_EXPERT = ("pp", "edp", "ep", "tp")


class Grid:
    """Ranks in a grid.

    remarks: what the emulated machine would refuse or do slowly. size: ranks in a group of each kind. grid: ranks by [pp, dp, cp, tp].
    lists: groups by kind. axes: mesh axes (name to size, outermost first), so
    chosen that as many kinds as possible are lines of the mesh.
    """

    def __init__(self, world: int, tp: int, pp: int, cp: int, ep: int):
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
        machine = _machine(world)
        order = _order(machine, world, tp)
        self.remarks: list[str] = [] if machine is None else machine.check(tp=tp, pp=pp, cp=cp, ep=ep, layout="nxd")
        self.grid = order.reshape([self.size[a] for a in _DENSE])
        expert = order.reshape([self.size[a] for a in _EXPERT])
        self.lists = {
            kind: lines(self.grid, _DENSE.index(kind)) if kind in _DENSE else lines(expert, _EXPERT.index(kind)) for kind in KINDS
        }
        self.axes = self._axes()
        self.order = tuple(int(r) for r in order)

    def _axes(self) -> dict[str, int]:
        size = self.size
        cp, ep, both = size["cp"], size["ep"], size["dp"] * size["cp"]
        if ep == 1 or (cp > 1 and cp % ep and ep % cp):
            return {"pp": size["pp"], "dp": size["dp"], "cp": cp, "tp": size["tp"]}
        if cp % ep == 0:
            return {"pp": size["pp"], "dp": size["dp"], "cp": cp // ep, "ep": ep, "tp": size["tp"]}
        return {"pp": size["pp"], "dp": both // ep, "ep": ep // cp, "cp": cp, "tp": size["tp"]}

    def place(self, kind: str, rank: int) -> int:
        """A rank's place in its group of a kind."""
        return next(group.index(rank) for group in self.lists[kind] if rank in group)

    def zero1_lists(self) -> list[list[int]]:
        """The ranks that share optimizer state under ZeRO-1: for every stage and tp rank, all its data and context parallel ranks."""
        found: list[list[int]] = np.moveaxis(self.grid, 3, 1).reshape(-1, self.size["dp"] * self.size["cp"]).tolist()
        return found


def _machine(world: int) -> Any:
    """The emulated machine (`nxd-run --instance`), if the world is all of its cores."""
    if not os.environ.get("NXD_JAX_INSTANCE"):
        return None
    from nxd_jax.topology import Topology

    topology = Topology.from_environment()
    return topology if topology.core_count == world else None


def _order(topology: Any, world: int, tp: int) -> np.ndarray:
    """Ranks in the order in which they fill the grid: NxD rearranges them on machines where the hardware wants it."""
    if topology is None:
        return np.arange(world)
    from nxd_jax.topology import layouts

    return np.asarray(layouts.rank_order(topology, tp, "nxd"))


def lines(grid: np.ndarray, axis: int) -> list[list[int]]:
    """Every line of the grid along an axis, in row-major order of the other axes."""
    found: list[list[int]] = np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis]).tolist()
    return found
