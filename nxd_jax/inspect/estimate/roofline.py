"""The estimate: how long each part of a step takes on a machine, and the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from nxd_jax.inspect import units
from nxd_jax.inspect.collectives import Collective
from nxd_jax.inspect.estimate.constants import DOCUMENTED, LANES, PEAK, SCALAR_HERTZ, VECTOR_HERTZ, Constants
from nxd_jax.inspect.estimate.work import Phase, Work
from nxd_jax.inspect.tables import Column, Table
from nxd_jax.inspect.traffic import Groups, axis_groups, traffic
from nxd_jax.topology import Topology


@dataclass(frozen=True)
class Term:
    """A part of the estimate, in seconds of one step.

    name: of the phase or collective, or "pipeline bubble". seconds: what it adds to the step. tensor, vector, memory: how long the Tensor engine, the Vector
    and Scalar engines, and HBM are busy with it; at each of its phases the longest of them counts. wire: how long the busiest link (or the memory of a chip)
    and then EFA are busy. latency: of the hops. limit: which of those takes longest. once: whether it is outside the pipeline, once a step.
    """

    name: str
    seconds: float
    tensor: float = 0.0
    vector: float = 0.0
    memory: float = 0.0
    wire: float = 0.0
    latency: float = 0.0
    limit: str = ""
    once: bool = False


@dataclass(frozen=True)
class Estimate:
    """How long a step takes. `print` shows every term.

    work: its name. machine: what it runs on. terms: what the step consists of. seconds: their sum. peak_seconds: the same if every engine, the memory and the
    wires reached their peaks. overlapped_seconds: and if nothing waited for anything else: the longest of the four alone (a lower bound). sequences, tokens:
    of a step. utilisation: of the Tensor engines' peak, by the products of the work (those computed again included). constants: that the terms are made with.
    """

    work: str
    machine: str
    terms: tuple[Term, ...]
    seconds: float
    peak_seconds: float
    overlapped_seconds: float
    sequences: int
    tokens: int
    utilisation: float
    constants: Constants

    @property
    def sequences_per_second(self) -> float:
        """Throughput of the whole job; 0 if the work does not say how many sequences a step has."""
        return self.sequences / self.seconds if self.seconds else 0.0

    def table(self) -> Table[Term]:
        """Every term."""
        note = (
            f"step {units.seconds(self.seconds)}; all at their peaks {units.seconds(self.peak_seconds)}, and perfectly overlapped "
            f"{units.seconds(self.overlapped_seconds)}; {self.utilisation:.0%} of the tensor engines' peak"
        )
        if self.sequences:
            note += f"; {self.sequences_per_second:,.4g} sequences/s"
        columns = [
            Column("term", lambda t: f"{t.name}, once" if t.once else t.name),
            Column("adds", "seconds", units.seconds, number=True),
            Column("share", lambda t: units.share(t.seconds, self.seconds), number=True),
            *(Column(k, _busy(k), units.seconds, number=True) for k in _RESOURCES),
            Column("limit", "limit"),
        ]
        return Table(f"{self.work}, on {self.machine}", self.terms, columns, note)

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().html()


_RESOURCES = ("tensor", "vector", "memory", "wire", "latency")


def _busy(resource: str) -> Callable[[Term], float | None]:
    """The time of an engine or wire, nothing where it has none."""
    return lambda term: getattr(term, resource) or None


def estimate(work: Work, topology: Topology, *, constants: Constants = DOCUMENTED, groups: Groups | None = None) -> Estimate:
    """How long a step takes on a machine.

    work: what a core does, of `transformer_work` or `program_work`. constants: what is reached of the peaks. groups: ranks along mesh axes; default: those of
    a mesh with the work's axes whose ranks are in row-major order.

    The rule: within a phase the engines and the memory work at the same time, so it takes as long as the slowest of them; phases come one after another, since
    each reads what the one before has made; and so do collectives, which nothing overlaps with. A collective takes its hops, and the time of the busiest link
    (or of the memory of the busiest chip, if that is longer), and after that the time of the network. A pipeline makes all but the
    update longer by the idle time of its schedule (`Work.bubble`).

    Raises ValueError if the machine has fewer cores than the work's mesh, if no document states a peak or bandwidth that is needed, and what `traffic` raises.
    """
    if work.cores > topology.core_count:
        raise ValueError(
            f"estimate: {work.name or 'the work'} is for {work.cores} cores, {topology!r} has {topology.core_count}; take more nodes (nodes=) or a smaller mesh"
        )
    by_axes = groups or (lambda axes: axis_groups(dict(work.axes), axes))
    terms = _terms(work, topology, constants, by_axes)
    ideal = _terms(
        work, topology, replace(PEAK, hop_seconds=constants.hop_seconds, network_hop_seconds=constants.network_hop_seconds), by_axes
    )
    seconds = sum(t.seconds for t in terms)
    products = sum(t.tensor for t in ideal)
    return Estimate(
        work=work.name,
        machine=f"{topology.nodes} x {topology.instance.name}",
        terms=tuple(terms),
        seconds=seconds,
        peak_seconds=sum(t.seconds for t in ideal),
        overlapped_seconds=_overlapped(ideal, work.bubble),
        sequences=work.sequences,
        tokens=work.tokens,
        utilisation=products / seconds if seconds else 0.0,
        constants=constants,
    )


def _terms(work: Work, topology: Topology, constants: Constants, groups: Groups) -> list[Term]:
    """One for each name: of the micro-batches, the bubble, of the update."""

    def of(phases: Iterable[Phase], collectives: Iterable[Collective], once: bool) -> list[Term]:
        computed = [_phase(p, topology, constants, once) for p in phases]
        return _merged([*computed, *(_sent(c, topology, constants, groups, once) for c in collectives)])

    repeated = of(work.phases, work.collectives, once=False)
    bubble = [Term("pipeline bubble", work.bubble * sum(t.seconds for t in repeated))] if work.stages > 1 else []
    return [*repeated, *bubble, *of(work.update, work.reductions, once=True)]


def _merged(terms: Iterable[Term]) -> list[Term]:
    """Terms of equal names added up."""
    found: dict[str, Term] = {}
    for t in terms:
        old = found.get(t.name)
        found[t.name] = t if old is None else replace(old, **{k: getattr(old, k) + getattr(t, k) for k in ("seconds", *_RESOURCES)})
    return [replace(t, limit=max(_RESOURCES, key=lambda k: getattr(t, k))) for t in found.values()]


def _overlapped(terms: Iterable[Term], bubble: float) -> float:
    """The longest of the engines, the memory and the wires if each had nothing to wait for."""
    found = 0.0
    kept = tuple(terms)
    for once in (False, True):
        longest = max(sum(getattr(t, k) for t in kept if t.once == once) for k in ("tensor", "vector", "memory", "wire"))
        found += longest * (1.0 if once else 1.0 + bubble)
    return found


# -- the parts ----------------------------------------------------------------------------------------


def _phase(p: Phase, topology: Topology, constants: Constants, once: bool) -> Term:
    tensor = p.flops / (topology.peak_flops_per_core(p.dtype) * constants.tensor) if p.flops else 0.0
    vector = p.elements / (_vector_rate(topology) * constants.vector)
    memory = p.bytes / (topology.hbm_bandwidth_per_core * constants.memory)
    return Term(p.name, max(tensor, vector, memory), tensor=tensor, vector=vector, memory=memory, once=once)


def _vector_rate(topology: Topology) -> float:
    """Elements per second that the Vector and the Scalar engines of a logical core take together."""
    version = topology.chip.core_version
    return topology.lnc * LANES * (VECTOR_HERTZ[version] + SCALAR_HERTZ[version])


def _sent(c: Collective, topology: Topology, constants: Constants, groups: Groups, once: bool) -> Term:
    found = traffic(topology, [c], groups)
    if math.isinf(found.network_seconds):
        raise ValueError(
            f"estimate: {c.kind} along {', '.join(c.axes)} goes between instances, and no document states a network for {topology.instance.name}; choose an "
            "instance with EFA, or groups within one instance"
        )
    if found.unplaced:  # its groups are not known: one link carries it
        slowest = min((link.bandwidth for link in topology.links()), default=topology.chip.hbm_bandwidth)
        wire = c.wire_bytes / slowest
    else:
        wire = max(found.link_seconds, found.local_seconds) + found.network_seconds
    latency = c.count * _steps(c, topology, constants, groups)
    name = f"{c.kind} along {' x '.join(c.axes)}"
    return Term(name, wire / constants.wire + latency, wire=wire / constants.wire, latency=latency, once=once)


def _steps(c: Collective, topology: Topology, constants: Constants, groups: Groups) -> float:
    """Seconds that the hops of one such collective take."""
    group = next(iter(groups(c.axes)))[: c.ranks]
    instances = len({topology.place(rank)[0] for rank in group})
    if c.kind in ("permute", "all-to-all"):
        return constants.network_hop_seconds if instances > 1 else constants.hop_seconds
    rounds = 2 if c.kind == "all-reduce" else 1
    within = len(group) // instances
    return rounds * ((within - 1) * constants.hop_seconds + (instances - 1) * constants.network_hop_seconds)
