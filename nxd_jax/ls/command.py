"""The `nxd-ls` command.

nxd-ls                             the machine that the environment describes, else the one that a running job emulates
nxd-ls --instance trn2.48xlarge    another one
nxd-ls -t                          with a drawing of the links
nxd-ls -j                          as JSON
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from nxd_jax.ls import view
from nxd_jax.ls.rows import devices, elsewhere, shown
from nxd_jax.top import records
from nxd_jax.top.jobs import Job, Watch
from nxd_jax.topology import INSTANCES, Topology, environment, instance

LNC_VARIABLES = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
VARIABLES = (
    "NXD_JAX_INSTANCE",
    "NXD_JAX_NNODES",
    "NEURON_PLATFORM_TARGET_OVERRIDE",
    "NEURON_RT_NUM_CORES",
    "NEURON_RT_VISIBLE_CORES",
    *LNC_VARIABLES,
)
"""What describes a machine."""

_WIDE = 400


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="nxd-ls",
        description="The Neuron devices of the emulated machine, and the processes that use them.",
        epilog="Without --instance, --nodes and --lnc the machine is the one that the environment describes (NXD_JAX_INSTANCE, NXD_JAX_NNODES, "
        "NEURON_LOGICAL_NC_CONFIG, ...); if that says nothing, the one that the running jobs emulate.",
        allow_abbrev=False,
    )
    found.add_argument("-w", "--wide", action="store_true", help="do not shorten commands, nor fit the table into the terminal")
    found.add_argument(
        "-a", "--show-all-procs", action="store_true", help="also processes that crashed, or that were last heard of on another host"
    )
    found.add_argument("-t", "--topology", action="store_true", help="also draw the links between the devices of a node")
    found.add_argument("-j", "--json-output", action="store_true", help="print JSON, a list with an entry for each device")
    found.add_argument("--instance", metavar="NAME", help=f"{', '.join(INSTANCES)}")
    found.add_argument("--nodes", type=_at_least_one, metavar="N", help="how many of them (an UltraServer, of 4 hosts, counts as one)")
    found.add_argument("--lnc", type=int, choices=(1, 2), help="physical cores per logical core (Trn2: 2 unless said otherwise)")
    found.add_argument("--dir", metavar="FOLDER", help="of the records that jobs publish (default: NXD_JAX_TOP_DIR, else the usual places)")
    return found


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, or 2 for options or variables that describe no machine."""
    args = parser().parse_args(arguments)
    if args.dir and not Path(args.dir).expanduser().is_dir():
        return _refused(f"there is no folder {args.dir} (--dir; NXD_JAX_TOP_DIR of a job says where it publishes)")
    jobs = Watch(lambda: records.folders(args.dir), keep=math.inf).look()
    try:
        topology, why = machine(os.environ, args.instance, args.nodes, args.lnc, jobs)
    except ValueError as error:
        return _refused(str(error))
    found = devices(topology, jobs, args.show_all_procs)
    if args.json_output:
        sys.stdout.write(json.dumps([asdict(device) for device in found], indent=4) + "\n")
        return 0
    console = Console(highlight=False, markup=False)
    plain = not console.is_terminal or console.is_dumb_terminal
    if plain or args.wide:
        console.width = _WIDE
    _print(console, view.heading(topology, why))
    console.print(view.table(found, args.wide, plain or console.options.ascii_only))
    if args.topology:
        _print(console, "\n" + view.drawing(topology))
    if others := elsewhere(topology, jobs, args.show_all_procs):
        _print(console, view.note(others))
    return 0


def _print(console: Console, text: str) -> None:
    """Lines as they are; without what the output cannot encode."""
    console.print(view.ascii_only(text) if console.options.ascii_only else text, soft_wrap=True)


def _refused(text: str) -> int:
    sys.stderr.write(f"nxd-ls: {text}\n")
    return 2


def machine(
    environ: Mapping[str, str], name: str | None = None, nodes: int | None = None, lnc: int | None = None, jobs: Sequence[Job] = ()
) -> tuple[Topology, str]:
    """The machine to show, all of its cores, and what chose it ('' for the options and the environment).

    name, nodes, lnc: win over the environment. jobs: if nothing else says anything and those that live emulate one machine, it is that one. ValueError,
    naming the option or the variable, if they describe no machine.
    """
    said = {variable: environ[variable] for variable in VARIABLES if environ.get(variable, "").strip()}
    if not said and name is None and nodes is None and lnc is None:
        emulated = {_whole(job.topology) for job in jobs if job.topology and shown(job)}
        if len(emulated) == 1:
            return emulated.pop(), "what the running jobs emulate"
    if name is not None:
        kept = {variable: said[variable] for variable in ("NXD_JAX_NNODES", *LNC_VARIABLES) if variable in said}
        said = {**kept, "NXD_JAX_INSTANCE": _checked(name)}
    if nodes is not None:
        said["NXD_JAX_NNODES"] = str(nodes)
    if lnc is not None:
        said = {**{k: v for k, v in said.items() if k not in LNC_VARIABLES}, "NEURON_LOGICAL_NC_CONFIG": str(lnc)}
    try:
        found = environment.read(said)
    except ValueError as error:
        meant = " (--lnc stands for NEURON_LOGICAL_NC_CONFIG)" if lnc is not None else ""
        raise ValueError(f"{error}{meant}") from None
    return Topology(found.instance, found.nodes, found.lnc), ""


def _checked(name: str) -> str:
    try:
        return instance(name).name
    except ValueError as error:
        raise ValueError(f"--instance: {error}") from None


def _whole(topology: Topology) -> Topology:
    """The same machine with all cores."""
    return Topology(topology.instance, topology.nodes, topology.lnc)
