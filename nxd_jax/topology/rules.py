"""Which group layouts the real hardware takes, as far as the Neuron documentation and release notes say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_jax.topology import layouts, links

if TYPE_CHECKING:
    from nxd_jax.topology.topology import Core, Topology

TP_DEGREES: dict[tuple[str, int], tuple[int, ...]] = {
    ("trn1", 1): (1, 2, 8, 32),
    ("inf2", 1): (1, 2, 4, 8, 12, 24),
    ("trn2", 2): (1, 2, 4, 8, 16, 32, 64),
    ("trn2", 1): (1, 4, 8, 32, 64, 128),
}
"""Tensor-parallel degrees known to work, by (platform target, LNC). 4 and 16 on trn1 work with conditions, see `check`."""

WORKER_COUNTS: dict[tuple[str, int], tuple[int, ...]] = {
    ("trn1.2xlarge", 1): (1, 2),
    ("trn1.32xlarge", 1): (1, 2, 8, 32),
    ("trn1n.32xlarge", 1): (1, 2, 8, 32),
    ("trn2.48xlarge", 2): (1, 4, 16, 64),
    ("trn2u.48xlarge", 2): (1, 4, 16, 64),
}
"""Documented numbers of workers on one node, by (instance, LNC)."""

_SINCE_2_24 = ((8, 8), (2, 32))  # (ranks, cores from one to the next) of groups across unwired chips that Trn2 learned, at LNC 2
_BUSY = ("tp", "cp", "ep")  # kinds of groups that talk inside every layer


def check(
    topology: Topology, tp: int = 1, pp: int = 1, dp: int | None = None, cp: int = 1, ep: int = 1, layout: str = "contiguous"
) -> list[str]:
    """One sentence for each thing that the hardware refuses or does slowly with these groups; empty when nothing is known against them.

    `dp` may be left out. Raises ValueError when the sizes do not fit the number of cores.
    """
    groups = layouts.groups(topology, tp, pp, cp, ep, dp, layout)
    found = worker_count(topology) + misplaced_cores(topology) + network(topology) + tp_degree(topology, tp, layout)
    rules = [_across_nodes, _lopsided, _scattered, _four_ranks, _sixteen_ranks]
    if not layouts.rearranged(topology, tp, layout):
        rules.insert(0, _misaligned)
    for kind in layouts.informative(groups):
        members = [[topology.cores[rank] for rank in group] for group in groups[kind]]
        for rule in rules:
            broken = [g for g in members if rule(topology, kind, g)]
            if broken:
                found.append(_say(kind, broken, len(members), rule(topology, kind, broken[0]) or ""))
    return list(dict.fromkeys(found))


def _say(kind: str, broken: list[list[Core]], total: int, why: str) -> str:
    first = [core.rank for core in broken[0]]
    shown = f"{first[0]}-{first[-1]}" if _is_run(first) else ", ".join(map(str, first[:8])) + (", ..." if len(first) > 8 else "")
    count = f"{len(broken)} of {total} {kind} groups" if total > 1 else f"the {kind} group"
    return f"{count} (e.g. ranks {shown}): {why}"


def worker_count(topology: Topology) -> list[str]:
    """Whether each node runs a documented number of workers."""
    allowed = WORKER_COUNTS.get((topology.instance.name, topology.lnc))
    if allowed is None or topology.cores_per_node in allowed:
        return []
    return [
        f"{topology.cores_per_node} workers per node: on {topology.instance.name} at LNC {topology.lnc} the documented counts are "
        f"{_or(allowed)}; collectives over other counts may not map onto the links"
    ]


def misplaced_cores(topology: Topology) -> list[str]:
    """Whether the visible cores start where a job of that size may start."""
    count, first = topology.cores_per_node, topology.visible[0]
    if first % count == 0:
        return []
    return [
        f"{count} cores starting at core {first}: the hardware wants a job of N cores to start at a multiple of N (here {first // count * count} or "
        f"{(first // count + 1) * count}); a misaligned job loads and compiles, then its collectives fail at run time"
    ]


def network(topology: Topology) -> list[str]:
    """Whether several nodes can work together at all."""
    instance = topology.instance
    if topology.nodes == 1:
        return []
    if instance.efa_gbps == 0:
        return [
            f"{topology.nodes} nodes of {instance.name}: this instance has no EFA, so collectives do not cross nodes; use trn1.32xlarge or larger"
        ]
    if instance.efa_gbps is None:
        return [
            f"{topology.nodes} nodes of {instance.name}: the documents give this instance no EFA network, so collectives may not cross nodes"
        ]
    if topology.cores_per_node < instance.cores_per_node(topology.lnc):
        return [
            f"{topology.cores_per_node} of {instance.cores_per_node(topology.lnc)} cores on each of {topology.node_count} nodes: training over several "
            "nodes is documented with all cores of each node only"
        ]
    return []


def tp_degree(topology: Topology, tp: int, layout: str = "contiguous") -> list[str]:
    """Whether the chip is known to do tensor parallelism of this degree, and what it takes."""
    target, lnc = topology.platform_target, topology.lnc
    known = TP_DEGREES[target, lnc]
    if target == "trn1" and tp == 4:
        if layout == "nxd":
            return []
        return [
            "tp 4 on trn1: groups of 4 ranks on adjacent cores need Neuron 2.21 or newer; NxD takes every n/4-th core of a node instead (layout='nxd')"
        ]
    if target == "trn1" and tp == 16:
        return [
            "tp 16 on trn1: of groups of 16 ranks only the all-reduce is documented, on cores 0-15 or 16-31, and not the all-gather and reduce-scatter that "
            f"sequence parallelism needs; use tp {_or(known)}"
        ]
    if tp not in known:
        where = f"{target} at LNC {lnc}" if len(topology.instance.lnc_options) > 1 else target
        return [
            f"tp {tp} is not a degree known to work on {where}; the links are wired for tp {_or(known)}, other groups are refused at load time or slow"
        ]
    return []


def _misaligned(topology: Topology, kind: str, group: list[Core]) -> str | None:
    ids = [core.id for core in group]
    if kind != "tp" or group[0].node != group[-1].node or not _is_run(ids) or ids[0] % len(ids) == 0:
        return None
    return (
        f"it starts at core {ids[0]}, which is no multiple of tp {len(ids)}; the program compiles and then fails at run time, because reduce-scatter "
        "cannot be mapped onto the hardware collective"
    )


def _across_nodes(topology: Topology, kind: str, group: list[Core]) -> str | None:
    if kind not in _BUSY or len({topology.place(core.rank)[0] for core in group}) == 1:
        return None
    share = topology.efa_gbps_per_core
    speed = f" ({share:g} Gbit/s per core)" if share else ""
    nodes = len({core.node for core in group})
    return f"it spans {nodes} nodes, so each layer waits for the network{speed}, not for NeuronLink; keep {kind} groups inside a node"


def _lopsided(topology: Topology, kind: str, group: list[Core]) -> str | None:
    by_node: dict[int, list[int]] = {}
    for core in group:
        by_node.setdefault(core.node, []).append(core.id)
    if len({tuple(sorted(ids)) for ids in by_node.values()}) == 1:
        return None
    return "it has different cores on different nodes; the runtime only forms groups with the same cores on every node and refuses others"


def _scattered(topology: Topology, kind: str, group: list[Core]) -> str | None:
    by_instance: dict[int, set[int]] = {}
    for core in group:
        which, chip = topology.place(core.rank)
        by_instance.setdefault(which, set()).add(chip)
    loose = next((chips for chips in by_instance.values() if not links.connected(topology.instance, chips)), None)
    if loose is None:
        return None
    ids = [core.id for core in group]
    if topology.device_kind == "NC_v3d" and (len(ids), ids[1] - ids[0]) in _SINCE_2_24:
        return "its chips are not wired to each other; such groups need Neuron 2.24 or newer (at tp 32 layout='nxd' avoids them)"
    return (
        f"its chips {', '.join(map(str, sorted(loose)[:8]))}{', ...' if len(loose) > 8 else ''} are not wired to each other; data passes through chips "
        "of other groups, slower, and JAX on Neuron may crash on such a mesh"
    )


def _four_ranks(topology: Topology, kind: str, group: list[Core]) -> str | None:
    if topology.platform_target != "trn1" or len(group) != 4 or group[0].node != group[-1].node:
        return None
    ids = [core.id for core in group]
    quarter = topology.instance.cores_per_node(topology.lnc) // 4
    if _is_run(ids) or [i - ids[0] for i in ids] == [0, quarter, 2 * quarter, 3 * quarter]:
        return None
    return f"trn1 does groups of 4 ranks on adjacent cores (Neuron 2.21) or one from each row of chips ({quarter} cores apart) only"


def _sixteen_ranks(topology: Topology, kind: str, group: list[Core]) -> str | None:
    if topology.platform_target != "trn1" or len(group) != 16 or group[0].node != group[-1].node:
        return None
    ids = [core.id for core in group]
    return None if _is_run(ids) and ids[0] % 16 == 0 else "trn1 does groups of 16 ranks on cores 0-15 or 16-31 only"


def _is_run(numbers: list[int]) -> bool:
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def _or(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}"
