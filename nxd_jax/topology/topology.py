"""The emulated machine: every core of one or more instances, in the order in which ranks are given out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from nxd_jax.topology import environment, layouts, rules
from nxd_jax.topology import links as wiring
from nxd_jax.topology.chips import Chip, dtype_name
from nxd_jax.topology.instances import Instance, instance

if TYPE_CHECKING:
    from jax.sharding import Mesh

_DEVICE_KINDS = {("v2", 1): "NC_v2", ("v3", 1): "NC_v3", ("v3", 2): "NC_v3d"}


@dataclass(frozen=True)
class Core:
    """One logical NeuronCore.

    Attributes:
        rank: its place among all cores of the topology, which is its rank in a job that uses them all.
        node: the host machine it belongs to.
        id: its logical core id on that node, as `NEURON_RT_VISIBLE_CORES` counts.
        chip: the chip (Neuron device) on that node.
        index: its place among the logical cores of that chip.
        physical: the physical cores on that node that it is made of.
    """

    rank: int
    node: int
    id: int
    chip: int
    index: int
    physical: tuple[int, ...]


class Topology:
    """The cores of `nodes` instances.

    Cores are numbered chip by chip and node by node. `print` shows a picture; notebooks show one in colour.

    Args:
        instance: an `Instance` or its name, e.g. "trn2.48xlarge".
        nodes: how many of them. An UltraServer counts as one, though it has 4 host machines (`node_count`).
        lnc: physical cores per logical core (`NEURON_LOGICAL_NC_CONFIG`): 1 or 2 on Trn2 (default 2), 1 elsewhere.
        visible: the core ids of each node to use (`NEURON_RT_VISIBLE_CORES`), increasing without gaps; default all.

    Raises:
        ValueError: for an unknown instance, an lnc that the chip does not have, or cores that a node does not have.
    """

    def __init__(self, instance: Instance | str, nodes: int = 1, lnc: int | None = None, visible: Iterable[int] | None = None) -> None:
        self.instance: Instance = _resolve(instance)
        self.nodes = nodes
        self.lnc: int = self.instance.lnc_default if lnc is None else lnc
        if nodes < 1:
            raise ValueError(f"nodes={nodes}: a topology has at least 1 node (NXD_JAX_NNODES)")
        if self.lnc not in self.instance.lnc_options:
            allowed = " or ".join(map(str, self.instance.lnc_options))
            raise ValueError(
                f"lnc={lnc} is not possible on {self.instance.name}: {self.chip.name} has logical cores of {allowed} physical cores "
                "(NEURON_LOGICAL_NC_CONFIG)"
            )
        held = self.instance.cores_per_node(self.lnc)
        self.visible: tuple[int, ...] = tuple(range(held) if visible is None else visible)
        environment.require_run(self.visible, f"visible={self.visible}")
        if not self.visible or self.visible[0] < 0 or self.visible[-1] >= held:
            raise ValueError(
                f"visible={self.visible}: a node of {self.instance.name} has cores 0-{held - 1} at LNC {self.lnc}; name at least one of them "
                "(NEURON_RT_VISIBLE_CORES), or choose a larger instance (NXD_JAX_INSTANCE)"
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Topology:
        """The topology that the environment variables describe (default: `os.environ`).

        `NXD_JAX_INSTANCE` names the instance; else `NEURON_PLATFORM_TARGET_OVERRIDE` (trn1, trn1n, trn2, inf2) stands for the smallest
        instance of that family that holds the cores; else trn1, or trn2 where trn1 does not have such cores. `NXD_JAX_NNODES` is the
        number of nodes, 1 by default. `NEURON_RT_VISIBLE_CORES` chooses cores of each node and wins over `NEURON_RT_NUM_CORES`, their
        number (0: all). `NEURON_LOGICAL_NC_CONFIG`, or the older `NEURON_RT_VIRTUAL_CORE_SIZE`, sets `lnc`.

        Raises ValueError naming the variable for a value that makes no sense. Warns when the visible cores start where the hardware does
        not let a job of that size start.
        """
        found = environment.read(os.environ if environ is None else environ)
        made = cls(found.instance, found.nodes, found.lnc, found.visible)
        for message in rules.misplaced_cores(made):
            warnings.warn(f"NEURON_RT_VISIBLE_CORES: {message}", stacklevel=2)
        return made

    @property
    def chip(self) -> Chip:
        """The chip that every node carries."""
        return self.instance.chip

    @property
    def platform_target(self) -> str:
        """What `torch_neuronx.utils.get_platform_target` says here: "trn1", "trn2" or "inf2"."""
        return self.chip.platform_target

    @property
    def device_kind(self) -> str:
        """What `xm.xla_device_kind` says here: "NC_v2", "NC_v3" (Trn2 at LNC 1) or "NC_v3d" (Trn2 at LNC 2)."""
        return _DEVICE_KINDS[self.chip.core_version, self.lnc]

    @property
    def node_count(self) -> int:
        """Host machines: `nodes`, times 4 for UltraServers."""
        return self.nodes * self.instance.nodes

    @property
    def cores_per_node(self) -> int:
        """Logical cores in use on each host machine (`LOCAL_WORLD_SIZE` of a job that uses them all)."""
        return len(self.visible)

    @property
    def cores_per_chip(self) -> int:
        """Logical cores that a chip has at this LNC, in use or not."""
        return self.chip.physical_cores // self.lnc

    @property
    def core_count(self) -> int:
        """Logical cores in use on all nodes: the world size."""
        return self.node_count * self.cores_per_node

    @cached_property
    def cores(self) -> tuple[Core, ...]:
        """All cores in use, by rank."""
        return tuple(
            Core(
                rank=node * self.cores_per_node + place,
                node=node,
                id=core,
                chip=core // self.cores_per_chip,
                index=core % self.cores_per_chip,
                physical=tuple(range(core * self.lnc, (core + 1) * self.lnc)),
            )
            for node in range(self.node_count)
            for place, core in enumerate(self.visible)
        )

    @property
    def hbm_per_core(self) -> int:
        """Device memory of one logical core in bytes: its share of the chip's. (At LNC 1 on Trn2 two cores share one 24 GiB bank.)"""
        return self.chip.hbm_bytes * self.lnc // self.chip.physical_cores

    @property
    def hbm_bandwidth_per_core(self) -> float:
        """One logical core's share of the chip's memory bandwidth, bytes/s."""
        return self.chip.hbm_bandwidth * self.lnc / self.chip.physical_cores

    @property
    def efa_gbps_per_core(self) -> float | None:
        """One logical core's share of its node's EFA bandwidth in Gbit/s (all cores of the node counted); None if not documented."""
        return None if self.instance.efa_gbps is None else self.instance.efa_gbps / self.instance.cores_per_node(self.lnc)

    def peak_flops_per_core(self, dtype: Any = "bfloat16") -> float:
        """Dense peak of one logical core in operations/s.

        `dtype` is a torch, NumPy or JAX dtype or a name ("bfloat16", "bf16", "tfloat32", "float8", ...). ValueError for a dtype without a
        documented peak, such as float64.
        """
        name, peaks = dtype_name(dtype), self.chip.peak_flops
        if name not in peaks:
            raise ValueError(f"{self.chip.name} has no documented peak for {name}; known: {', '.join(peaks)}")
        return peaks[name] * self.lnc / self.chip.physical_cores

    def connected_devices(self) -> dict[int, tuple[int, ...]]:
        """For each chip of one node its neighbours on that node, in the order in which `neuron-ls` prints CONNECTED DEVICES."""
        size = self.instance.chips_per_node
        table = wiring.neighbours(self.instance)
        return {chip: tuple(c for c in table[chip] if c < size) for chip in range(size)}

    def links(self) -> tuple[wiring.Link, ...]:
        """The NeuronLinks of one instance (of one UltraServer), each once; its chips are numbered node by node."""
        return wiring.links(self.instance)

    def hops(self, rank_a: int, rank_b: int) -> int | None:
        """NeuronLinks on the shortest way between the chips of two ranks: 0 on one chip, None where only the network joins them."""
        (instance_a, chip_a), (instance_b, chip_b) = self.place(rank_a), self.place(rank_b)
        return int(wiring.hops(self.instance)[chip_a, chip_b]) if instance_a == instance_b else None

    def place(self, rank: int) -> tuple[int, int]:
        """(instance, chip in that instance) of a rank. In an UltraServer the chips of its 4 nodes are numbered 0-63."""
        core = self.cores[rank]
        which, node = divmod(core.node, self.instance.nodes)
        return which, node * self.instance.chips_per_node + core.chip

    def groups(
        self, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, dp: int | None = None, layout: str = "contiguous"
    ) -> layouts.Groups:
        """Lists of ranks by kind of group ("tp", "dp", "pp", "cp", "ep", "edp"), in NxD's orders; see `layouts.groups`.

        `layout="nxd"` gives the groups that NxD picks on this hardware where they differ from the contiguous ones, which the mesh has.
        """
        return layouts.groups(self, tp, pp, cp, ep, dp, layout)

    def check(self, tp: int = 1, pp: int = 1, dp: int | None = None, cp: int = 1, ep: int = 1, layout: str = "contiguous") -> list[str]:
        """What the real hardware would refuse or do slowly with these groups: one sentence each, empty if nothing is known against them."""
        return rules.check(self, tp, pp, dp, cp, ep, layout)

    def mesh(self, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
        """The `jax.sharding.Mesh` of these cores: axes (pp, dp, cp, tp), device i standing for rank i, tp innermost.

        `ep` is checked, but splits dp (and cp) without an axis of its own: `expert_mesh` shows the same devices with that axis.
        `devices` defaults to the first `core_count` of `jax.devices()`; ValueError if there are fewer.
        """
        size = layouts.sizes(self.core_count, tp, pp, cp, ep)
        return self._mesh({axis: size[axis] for axis in ("pp", "dp", "cp", "tp")}, devices)

    def expert_mesh(self, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
        """The same devices as `mesh` with axes (pp, edp, ep, tp), as expert layers see them: cp is folded into edp * ep."""
        size = layouts.sizes(self.core_count, tp, pp, cp, ep)
        return self._mesh({axis: size[axis] for axis in ("pp", "edp", "ep", "tp")}, devices)

    def _mesh(self, axes: dict[str, int], devices: Sequence[Any] | None) -> Mesh:
        import jax

        found = list(jax.devices() if devices is None else devices)
        if len(found) < self.core_count:
            raise ValueError(
                f"{self!r} has {self.core_count} cores, but there are {len(found)} JAX devices; before JAX starts, call "
                f'jax.config.update("jax_num_cpu_devices", {self.core_count}) with JAX_PLATFORMS=cpu, or choose fewer cores '
                "(NEURON_RT_NUM_CORES, NXD_JAX_INSTANCE, NXD_JAX_NNODES)"
            )
        grid = np.array(found[: self.core_count], dtype=object).reshape(tuple(axes.values()))
        return jax.sharding.Mesh(grid, tuple(axes))

    def __repr__(self) -> str:
        part = "" if self.cores_per_node == self.instance.cores_per_node(self.lnc) else f", visible={self.visible[0]}-{self.visible[-1]}"
        return f"Topology({self.instance.name!r}, nodes={self.nodes}, lnc={self.lnc}{part}: {self.core_count} cores)"

    def __str__(self) -> str:
        from nxd_jax.topology.pictures import text

        return text(self)

    def _repr_html_(self) -> str:
        from nxd_jax.topology.pictures import html

        return html(self)

    def _key(self) -> tuple[Any, ...]:
        return (self.instance, self.nodes, self.lnc, self.visible)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topology) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


def _resolve(wanted: Instance | str) -> Instance:
    return wanted if isinstance(wanted, Instance) else instance(wanted)
