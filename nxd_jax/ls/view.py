"""The devices as a table and as a drawing."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from nxd_jax.ls.rows import Device, Process, span
from nxd_jax.top.jobs import Job
from nxd_jax.topology import Topology
from nxd_jax.topology.text_picture import torus

COMMAND = 40
"""Characters of a command that are shown unless the table may be wide."""

_COLUMNS = (
    "NEURON\nDEVICE",
    "NEURON\nCORES",
    "NEURON\nCORE IDS",
    "NEURON\nMEMORY",
    "CONNECTED\nDEVICES",
    "PCI\nBDF",
    "CPU\nAFFINITY",
    "NUMA\nNODE",
)
_PROCESS_COLUMNS = ("PID", "COMMAND", "STATE", "ITS\nCORES")
_ASCII = str.maketrans("─│┌┐└┘├┤┬┴┼…", "-|+++++++++.")


def heading(topology: Topology, why: str = "") -> str:
    """Lines on the machine. why: what chose it, behind its name."""
    lines = [f"instance-type: {topology.instance.name}{f' ({why})' if why else ''}", f"logical-neuroncore-config: {topology.lnc}"]
    if topology.node_count > 1:
        lines.append(f"nodes: {topology.node_count}")
    return "\n".join(lines)


def table(devices: Sequence[Device], wide: bool = False, plain: bool = False) -> Table:
    """The devices, each with a line for every process that uses it.

    wide: commands in full. plain: of ASCII characters, as `neuron-ls` draws it.
    """
    several = devices[-1].node > 0
    busy = any(device.neuron_processes for device in devices)
    made = Table(box=box.ASCII2 if plain else box.ROUNDED, header_style="" if plain else "bold")
    for name in (*(["NODE"] if several else []), *_COLUMNS, *(_PROCESS_COLUMNS if busy else ())):
        made.add_column(name, no_wrap=name == "COMMAND" and not wide, overflow="ellipsis" if name == "COMMAND" and not wide else "fold")
    for device in devices:
        start = [*([str(device.node)] if several else []), *_cells(device)]
        if not busy:
            made.add_row(*start)
            continue
        processes: Sequence[Process | None] = device.neuron_processes or (None,)
        for i, process in enumerate(processes):
            cells = [*(start if i == 0 else [""] * len(start)), *_process_cells(process, wide)]
            made.add_row(*map(Text, cells), end_section=len(processes) > 1 and i + 1 == len(processes))
    return made


def _cells(device: Device) -> list[str]:
    return [
        str(device.neuron_device),
        str(device.nc_count),
        span(device.neuroncore_ids),
        f"{device.memory_size // 2**30} GB",
        ", ".join(map(str, device.connected_to or ())) or "-",
        device.bdf or "-",
        device.cpu_affinity or "-",
        device.numa_node or "-",
    ]


def _process_cells(process: Process | None, wide: bool) -> list[str]:
    if process is None:
        return [""] * len(_PROCESS_COLUMNS)
    command = process.command
    short = command if wide or len(command) <= COMMAND else command[: COMMAND - 3] + "..."
    return [str(process.pid), short, process.state, span(process.neuroncore_ids)]


def note(jobs: Sequence[Job]) -> str:
    """A line for each job that emulates another machine than the one shown; '' without any."""
    return "\n".join(_elsewhere(job) for job in jobs)


def _elsewhere(job: Job) -> str:
    found, record = job.topology, job.record
    if found is None:
        return f"not shown: {record.script} (pid {record.pid}), whose variables describe no machine with {record.world_size} cores"
    nodes = f" --nodes {found.nodes}" * (found.nodes > 1)
    lnc = f" --lnc {found.lnc}" * (found.lnc != found.instance.lnc_default)
    return f"not shown: {record.script} (pid {record.pid}), on another machine: nxd-ls --instance {found.instance.name}{nodes}{lnc}"


def drawing(topology: Topology) -> str:
    """The links of a node."""
    legend = "\n\nEqual letters are the two ends of one link that wraps around." if len(topology.instance.grid) > 1 else ""
    return f"Neuron Device Topology\n{torus(topology)}{legend}"


def ascii_only(text: str) -> str:
    """The same drawing without characters that some terminals lack."""
    return text.translate(_ASCII)
