"""What collectives put on every NeuronLink, on the network and on the memory of a chip."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from nxd_jax.inspect import units
from nxd_jax.inspect.collectives import Collective
from nxd_jax.inspect.tables import Column, Table
from nxd_jax.topology import Instance, Link, Topology
from nxd_jax.topology import links as wiring

Groups = Callable[[tuple[str, ...]], Sequence[Sequence[int]]]
"""The groups of ranks along mesh axes."""

TOUCHES = 2
"""How often the memory of a chip moves a byte that goes from one of its cores to another: it is read once and written once."""


@dataclass(frozen=True)
class Traffic:
    """Bytes on every wire, as `traffic` finds them.

    links: (number of the instance, link) -> bytes over it, both directions together; links without traffic are left out. network: host machine -> bytes
    that it sends over EFA (it receives as many). local: (number of the instance, chip) -> bytes that go between cores of that chip, in its memory.
    unplaced: collectives of which it is not known who takes part in what group (fewer ranks than their axes hold); they are in none of the numbers.
    network_bandwidth: of one host machine, bytes/s, None where no document states it. memory_bandwidth: of one chip, bytes/s.
    """

    links: dict[tuple[int, Link], float]
    network: dict[int, float]
    local: dict[tuple[int, int], float]
    unplaced: tuple[Collective, ...] = field(default=(), kw_only=True)
    network_bandwidth: float | None = field(default=None, kw_only=True)
    memory_bandwidth: float = field(default=math.inf, kw_only=True)

    @property
    def link_seconds(self) -> float:
        """How long the link with the most to carry takes at its full bandwidth, in seconds."""
        return max((n / link.bandwidth for (_, link), n in self.links.items()), default=0.0)

    @property
    def local_seconds(self) -> float:
        """How long the memory of the busiest chip takes for what its cores send each other, in seconds: every byte is read and written."""
        return max((TOUCHES * n / self.memory_bandwidth for n in self.local.values()), default=0.0)

    @property
    def network_seconds(self) -> float:
        """How long the host machine that sends most takes at its full EFA bandwidth, in seconds; infinite if it has none, or none is documented."""
        most = max(self.network.values(), default=0.0)
        return most / self.network_bandwidth if self.network_bandwidth else (math.inf if most else 0.0)

    def table(self, most: int | None = 40) -> Table[Load]:
        """Every wire that carries something, the one that needs longest first."""
        rows = [Load(f"link {_ends(link)}", link.axis, at, n, n / link.bandwidth) for (at, link), n in self.links.items()]
        rows += [Load(f"chip {chip}", "local", at, n, TOUCHES * n / self.memory_bandwidth) for (at, chip), n in self.local.items()]
        rate = self.network_bandwidth
        rows += [Load(f"host {host}", "EFA", host, n, n / rate if rate else None) for host, n in self.network.items()]
        rows.sort(key=lambda r: -math.inf if r.seconds is None else -r.seconds)
        note = "bytes of all collectives together, both directions of a link"
        if self.unplaced:
            size = units.size(sum(c.wire_bytes for c in self.unplaced))
            note += f"; without {len(self.unplaced)} whose groups are not known ({size} that each core sends)"
        return Table("Traffic", rows, _COLUMNS, note, most)

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().html()


@dataclass(frozen=True)
class Load:
    """What one wire carries. where: "link 0-4", "chip 3" or "host 1". kind: the link's axis ("x", "y", "z", "ring"), "local" or "EFA". instance: its number
    (of a host: the host's). bytes: it carries. seconds: that takes at full bandwidth; None where no document states the bandwidth."""

    where: str
    kind: str
    instance: int
    bytes: float
    seconds: float | None


_COLUMNS = (
    Column("where", "where"),
    Column("kind", "kind"),
    Column("instance", "instance", number=True),
    Column("bytes", "bytes", units.size, number=True),
    Column("at full bandwidth", "seconds", units.seconds, number=True),
)


def traffic(topology: Topology, collectives: Iterable[Collective], groups: Groups) -> Traffic:
    """What the collectives put on each wire of a topology, all of them together.

    collectives: what every core asks for (`Collective.bytes` are those of the inputs on one core, of all `count` together). groups: gives the groups of ranks
    along mesh axes, for instance `lambda axes: axis_groups(sizes, axes)`.

    The model, for a group of r ranks that each put in b bytes:

    - On one instance the ranks form a ring in their order, and each sends to the next: 2 (r-1)/r b for an all-reduce, (r-1) b for an all-gather (b is a shard),
      (r-1)/r b for a reduce-scatter, b for a permute (a shift round the ring). In an all-to-all each sends b/r to every other directly.
    - Between two chips, bytes share all the shortest ways over the links evenly. Between cores of one chip they go through its memory.
    - Over several instances with equally many ranks x of the group on each of y: hierarchical. An all-reduce is a reduce-scatter among the x, an
      all-reduce of b/x among the y with the same place, and an all-gather among the x; a reduce-scatter the first two, the second of them a reduce-scatter; an
      all-gather gathers b among the y, then y b among the x. Elsewhere (unequal numbers, permutes) the ring goes on from one instance to the next.
    - An UltraServer is one instance: its host machines are joined by links, not by EFA.

    Collectives among fewer ranks than the groups have (groups that are no lines of the mesh) are not placed: `Traffic.unplaced` has them.

    Raises ValueError for a kind of collective that is not known, groups of fewer ranks than take part, and ranks that the topology does not have.
    """
    return traffic_among(topology, ((c, groups(c.axes)) for c in collectives))


def traffic_among(
    topology: Topology,
    collectives: Iterable[tuple[Collective, Sequence[Sequence[int]]]],
    messages: Iterable[tuple[int, int, float]] = (),
) -> Traffic:
    """The same for collectives that come with the groups of ranks that ask for them, and for messages: (from, to, bytes)."""
    flows: dict[tuple[int, int], float] = {}
    unplaced = []
    for source, target, size in messages:
        flows[source, target] = flows.get((source, target), 0.0) + size
    for c, found in collectives:
        if any(len(group) > c.ranks for group in found):
            unplaced.append(c)
            continue
        for group in found:
            _check(c, group, topology)
            for source, target, size in _sends(topology, c, group):
                flows[source, target] = flows.get((source, target), 0.0) + size
    return _carried(topology, flows, tuple(unplaced))


def axis_groups(sizes: dict[str, int], axes: Sequence[str]) -> list[list[int]]:
    """The groups of ranks along mesh axes, for ranks that fill the mesh in row-major order.

    sizes: of all axes, outermost first. axes: those along which the ranks of a group differ; none: each rank is a group. The ranks of a group ascend.
    Raises ValueError for an axis that the mesh does not have.
    """
    unknown = [a for a in axes if a not in sizes]
    if unknown:
        raise ValueError(f"axis_groups: the mesh has no axis {unknown[0]!r}; it has {', '.join(map(repr, sizes)) or 'none'}")
    grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    along = [i for i, a in enumerate(sizes) if a in axes]
    others = [i for i in range(grid.ndim) if i not in along]
    groups: list[list[int]] = grid.transpose(others + along).reshape(-1, math.prod(grid.shape[i] for i in along)).tolist()
    return groups


def _check(c: Collective, group: Sequence[int], topology: Topology) -> None:
    if len(group) != c.ranks:
        raise ValueError(
            f"traffic: a collective ({c.kind}) along {c.axes} is among {c.ranks} ranks, but groups({c.axes}) gives a group of {len(group)}; let groups() give "
            "all that take part"
        )
    if max(group) >= topology.core_count:
        raise ValueError(
            f"traffic: rank {max(group)} of a group along {c.axes} is not one of the {topology.core_count} cores of {topology!r}; take more nodes (nodes=)"
        )


# -- who sends how much to whom ----------------------------------------------------------------------

_RING = {
    "all-reduce": lambda r: 2 * (r - 1) / r,
    "all-gather": lambda r: r - 1,
    "reduce-scatter": lambda r: (r - 1) / r,
    "permute": lambda r: 1.0,
}
"""Times its input that a rank sends to the next one of a ring of r."""


def _sends(topology: Topology, c: Collective, group: Sequence[int]) -> Iterator[tuple[int, int, float]]:
    """(from, to, bytes) of one group."""
    if c.kind == "all-to-all":
        yield from ((a, b, c.bytes / len(group)) for a in group for b in group if a != b)
        return
    if c.kind not in _RING:
        raise ValueError(f"traffic: {c.kind!r} is no collective that is known; it must be one of {', '.join([*_RING, 'all-to-all'])}")
    by_instance: dict[int, list[int]] = {}
    for rank in group:
        by_instance.setdefault(topology.place(rank)[0], []).append(rank)
    rows = list(by_instance.values())
    if c.kind == "permute" or len(rows) == 1 or len({len(row) for row in rows}) > 1:
        yield from _ring(group, _RING[c.kind](len(group)) * c.bytes)
        return
    x, y, factor = len(rows[0]), len(rows), _RING[c.kind]
    within = c.bytes * y if c.kind == "all-gather" else c.bytes
    between = c.bytes if c.kind == "all-gather" else c.bytes / x
    for row in rows:
        yield from _ring(row, factor(x) * within)
    for column in zip(*rows, strict=True):
        yield from _ring(column, factor(y) * between)


def _ring(ranks: Sequence[int], size: float) -> Iterator[tuple[int, int, float]]:
    if len(ranks) > 1:
        yield from ((a, b, size) for a, b in zip(ranks, [*ranks[1:], ranks[0]], strict=True))


# -- on which wires ----------------------------------------------------------------------------------


def _carried(topology: Topology, flows: dict[tuple[int, int], float], unplaced: tuple[Collective, ...]) -> Traffic:
    links: dict[tuple[int, Link], float] = {}
    network: dict[int, float] = {}
    local: dict[tuple[int, int], float] = {}
    for (source, target), size in flows.items():
        (here, a), (there, b) = topology.place(source), topology.place(target)
        if here != there:
            host = topology.cores[source].node
            network[host] = network.get(host, 0.0) + size
        elif a == b:
            local[here, a] = local.get((here, a), 0.0) + size
        else:
            for link, part in ways(topology.instance, a, b):
                links[here, link] = links.get((here, link), 0.0) + part * size
    gbps = topology.instance.efa_gbps or topology.instance.network_gbps
    rate = gbps * 1e9 / 8 if gbps else None
    return Traffic(links, network, local, unplaced=unplaced, network_bandwidth=rate, memory_bandwidth=topology.chip.hbm_bandwidth)


@cache
def ways(instance: Instance, a: int, b: int) -> tuple[tuple[Link, float], ...]:
    """The links on the shortest ways from chip `a` to chip `b` of an instance, and the part of the bytes that each carries if all ways share them evenly."""
    distance, table = wiring.hops(instance), wiring.neighbours(instance)
    total = int(distance[a, b])
    after: dict[int, int] = {b: 1}  # chip -> number of shortest ways on from it to b
    for left in range(1, total + 1):
        ring = [c for c in range(instance.chips) if distance[c, b] == left and distance[a, c] == total - left]
        after |= {c: sum(after[d] for d in set(table[c]) if d in after and distance[d, b] == left - 1) for c in ring}
    found, reach = [], {a: 1.0}  # chip -> part of the bytes that comes through it
    for done in range(total):
        for c in [c for c in reach if distance[a, c] == done]:
            for d in sorted(set(table[c])):
                if d in after and distance[d, b] == total - done - 1:
                    part = reach[c] * after[d] / after[c]
                    reach[d] = reach.get(d, 0.0) + part
                    found.append((_between(instance)[min(c, d), max(c, d)], part))
    return tuple(found)


@cache
def _between(instance: Instance) -> dict[tuple[int, int], Link]:
    return {link.chips: link for link in wiring.links(instance)}


def _ends(link: Link) -> str:
    return f"{link.chips[0]}-{link.chips[1]}"
