"""The EC2 instances as data: chips on a grid, host, network."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nxd_jax.topology.chips import GIB, INFERENTIA2, TRAINIUM1, TRAINIUM1N, TRAINIUM2, Chip


@dataclass(frozen=True)
class Instance:
    """One kind of EC2 instance, or the UltraServer that joins several of them.

    Attributes:
        name: EC2 name, e.g. "trn2.48xlarge".
        chip: the chip it carries.
        grid: shape the chips of one node are wired in. `(rows, columns)` is a 2-D torus with chip = columns * row + column; `(n,)` is a ring.
        vcpus: host CPU threads, all nodes together.
        host_memory_bytes: host memory in bytes, all nodes together.
        nodes: host machines in it: 1, or 4 for an UltraServer, whose chips of equal number form rings across the nodes.
        efa_gbps: EFA bandwidth of one node, Gbit/s; 0 where the instance has no EFA; None where the documents do not state it.
        efa_devices: EFA devices of one node; None where the documents do not state it.
        network_gbps: bandwidth of the ordinary network where that is all there is, Gbit/s; None elsewhere.
        aliases: other names that `instance` accepts for it.
    """

    name: str
    chip: Chip
    grid: tuple[int, ...]
    vcpus: int
    host_memory_bytes: int
    nodes: int = 1
    efa_gbps: float | None = None
    efa_devices: int | None = None
    network_gbps: float | None = None
    aliases: tuple[str, ...] = ()

    @property
    def chips_per_node(self) -> int:
        """Chips of one host machine."""
        count = 1
        for size in self.grid:
            count *= size
        return count

    @property
    def chips(self) -> int:
        """Chips of the whole instance."""
        return self.chips_per_node * self.nodes

    @property
    def lnc_options(self) -> tuple[int, ...]:
        """Allowed numbers of physical cores per logical core."""
        return self.chip.lnc_options

    @property
    def lnc_default(self) -> int:
        """Physical cores per logical core when nothing is set."""
        return self.chip.lnc_default

    @property
    def hbm_bytes(self) -> int:
        """Device memory of the whole instance, bytes."""
        return self.chips * self.chip.hbm_bytes

    def cores_per_node(self, lnc: int | None = None) -> int:
        """Logical cores of one node with `lnc` physical cores each (default: `lnc_default`)."""
        return self.chips_per_node * self.chip.physical_cores // (lnc or self.lnc_default)

    def core_count(self, lnc: int | None = None) -> int:
        """Logical cores of the whole instance with `lnc` physical cores each (default: `lnc_default`)."""
        return self.nodes * self.cores_per_node(lnc)


_TRN1_32 = Instance("trn1.32xlarge", TRAINIUM1, (4, 4), 128, 512 * GIB, efa_gbps=800, efa_devices=8)
_TRN2_48 = Instance("trn2.48xlarge", TRAINIUM2, (4, 4), 192, 2048 * GIB, efa_gbps=3200, aliases=("trn2n.48xlarge",))
_TRN2U = replace(_TRN2_48, name="trn2u.48xlarge", aliases=())

_ALL = (
    Instance("trn1.2xlarge", TRAINIUM1, (1,), 8, 32 * GIB, efa_gbps=0, efa_devices=0, network_gbps=25),
    _TRN1_32,
    replace(_TRN1_32, name="trn1n.32xlarge", chip=TRAINIUM1N, efa_gbps=1600, efa_devices=16),
    Instance("trn2.3xlarge", TRAINIUM2, (1,), 12, 128 * GIB),
    _TRN2_48,
    _TRN2U,
    replace(
        _TRN2U,
        name="trn2u.48xlarge-ultraserver",
        nodes=4,
        vcpus=768,
        host_memory_bytes=8192 * GIB,
        aliases=("trn2-ultraserver", "u-trn2"),
    ),
    Instance("inf2.xlarge", INFERENTIA2, (1,), 4, 16 * GIB),
    Instance("inf2.8xlarge", INFERENTIA2, (1,), 32, 128 * GIB),
    Instance("inf2.24xlarge", INFERENTIA2, (6,), 96, 384 * GIB),
    Instance("inf2.48xlarge", INFERENTIA2, (12,), 192, 768 * GIB),
)

INSTANCES: dict[str, Instance] = {i.name: i for i in _ALL}
"""Every known instance by its name, smallest first within a family.

The documents do not describe trn2.3xlarge at all (vCPUs and memory come from public third-party code; its network is None), give no
count of EFA devices for Trn2, and no network for inf2. Of the UltraServer they print 3,200 Gbit/s of EFA, the figure of one of its nodes.
"""

_BY_ALIAS = {alias: i for i in _ALL for alias in i.aliases}


def instance(name: str) -> Instance:
    """The instance of that name or alias (case does not matter); ValueError with the allowed names otherwise."""
    wanted = name.strip().lower()
    found = INSTANCES.get(wanted) or _BY_ALIAS.get(wanted)
    if found is None:
        aliases = ", ".join(f"{alias} = {i.name}" for alias, i in _BY_ALIAS.items())
        raise ValueError(f"no instance is called {name!r}; use one of {', '.join(INSTANCES)} (also {aliases})")
    return found
