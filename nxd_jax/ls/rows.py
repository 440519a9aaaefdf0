"""The devices of an emulated machine as rows, with the fields that `neuron-ls -j` has, and the processes that use them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nxd_jax.top.jobs import GONE, Job
from nxd_jax.top.records import Record
from nxd_jax.topology import Topology

NUMA_NODES: dict[str, tuple[int, ...]] = {
    "trn1.32xlarge": (0, 0, 1, 1) * 4,
    "trn2.48xlarge": (1,) * 4 + (0,) * 8 + (1,) * 4,
}
"""The NUMA node of each device, for the instances whose documents state it."""


@dataclass(frozen=True)
class Process:
    """A process on a device.

    Attributes:
        pid: its number.
        command: its script. Not the arguments, which may hold secrets.
        neuron_runtime_version: None, for no Neuron runtime is there.
        state: what it does, a word of `nxd_jax.top.jobs.STATES`.
        neuroncore_ids: the logical cores of the device that it uses.
    """

    pid: int
    command: str
    neuron_runtime_version: str | None
    state: str
    neuroncore_ids: tuple[int, ...]


@dataclass(frozen=True)
class Device:
    """A Neuron device (chip) of a node. `bdf` and `cpu_affinity` are None, and so is `numa_node` where the documents do not state it.

    Attributes:
        instance_type: the instance's name.
        node: the host machine that holds it, from 0.
        neuron_device: its number on the node.
        bdf: PCI address.
        cpu_affinity: host CPUs near it.
        numa_node: the host's NUMA node that it is attached to, as text, as `neuron-ls` gives it.
        connected_to: the devices of the same node that it has a link to: up, left, down, right; None where it has none.
        nc_count: its logical cores.
        logical_neuroncore_config: physical cores per logical core.
        memory_size: its memory, bytes.
        neuroncore_ids: its logical cores, as `NEURON_RT_VISIBLE_CORES` counts them.
        neuron_processes: the processes that use it.
    """

    instance_type: str
    node: int
    neuron_device: int
    bdf: str | None
    cpu_affinity: str | None
    numa_node: str | None
    connected_to: tuple[int, ...] | None
    nc_count: int
    logical_neuroncore_config: int
    memory_size: int
    neuroncore_ids: tuple[int, ...]
    neuron_processes: tuple[Process, ...]


def devices(topology: Topology, jobs: Iterable[Job] = (), all_processes: bool = False) -> tuple[Device, ...]:
    """Every device of the machine, node by node, whether its cores are visible or not.

    Args:
        topology: the machine.
        jobs: what runs (`nxd_jax.top.Watch.look`). Those that emulate other machines are passed over; `elsewhere` names them.
        all_processes: also processes that crashed or ended, as long as something is known of them.
    """
    used = _used(topology, jobs, all_processes)
    around, per_chip = topology.connected_devices(), topology.cores_per_chip
    numa = NUMA_NODES.get(topology.instance.name)
    return tuple(
        Device(
            instance_type=topology.instance.name,
            node=node,
            neuron_device=chip,
            bdf=None,
            cpu_affinity=None,
            numa_node=str(numa[chip]) if numa else None,
            connected_to=around[chip] or None,
            nc_count=per_chip,
            logical_neuroncore_config=topology.lnc,
            memory_size=topology.chip.hbm_bytes,
            neuroncore_ids=tuple(range(chip * per_chip, (chip + 1) * per_chip)),
            neuron_processes=tuple(used.get((node, chip), ())),
        )
        for node in range(topology.node_count)
        for chip in range(topology.instance.chips_per_node)
    )


def shown(job: Job, all_processes: bool = False) -> tuple[int, ...]:
    """The numbers of the job's processes that are to be listed: those that live, or all."""
    return tuple(p.record.pid for p in job.processes if all_processes or p.state not in GONE)


def same_machine(topology: Topology, job: Job) -> bool:
    """Whether a job emulates cores of this machine: the same instance with logical cores of the same size, on no more nodes than there are."""
    found = job.topology
    return found is not None and (found.instance, found.lnc) == (topology.instance, topology.lnc) and found.nodes <= topology.nodes


def elsewhere(topology: Topology, jobs: Iterable[Job], all_processes: bool = False) -> tuple[Job, ...]:
    """The jobs with processes to list that emulate another machine."""
    return tuple(job for job in jobs if shown(job, all_processes) and not same_machine(topology, job))


def _used(topology: Topology, jobs: Iterable[Job], all_processes: bool) -> dict[tuple[int, int], list[Process]]:
    """For each (node, chip) in use its processes."""
    found: dict[tuple[int, int], list[Process]] = {}
    for job in jobs:
        listed = shown(job, all_processes)
        if job.topology is None or not same_machine(topology, job):
            continue
        for process in job.processes:
            if process.record.pid not in listed:
                continue
            ids: dict[tuple[int, int], list[int]] = {}
            for node, core in _cores(job.topology, process.record):
                ids.setdefault((node, core // topology.cores_per_chip), []).append(core)
            for place, cores in ids.items():
                one = Process(process.record.pid, process.record.script, None, process.state, tuple(cores))
                found.setdefault(place, []).append(one)
    return found


def _cores(topology: Topology, record: Record) -> Iterator[tuple[int, int]]:
    """The (node, core id) of each rank of a process: nodes hold `local_size` ranks each, on their first visible cores."""
    per_node = min(record.local_size, topology.cores_per_node)
    if record.world_size > per_node * topology.node_count:
        per_node = topology.cores_per_node
    for rank in record.hosted:
        node, place = divmod(rank, per_node)
        yield node, topology.visible[place]


def span(numbers: Sequence[int]) -> str:
    """Core ids as `neuron-ls` writes them: a range where they are one, else each."""
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers)) or "-"
