"""`nxd-run`: run a training script for every core of an emulated Trainium machine, in one process.

    nxd-run --instance trn1.32xlarge script.py --epochs 3
    nxd-run --nproc_per_node 8 script.py
    torchrun --nproc_per_node 2 --no-python nxd-run --nproc_per_node 4 script.py

It sets what `torchrun` would set (RANK, WORLD_SIZE, LOCAL_RANK, ...) and runs the script once for all ranks. The options are torchrun's where they
mean something here; `-m` runs a module. Use torchrun itself for one process per rank; under torchrun, each process has as many ranks as --nproc_per_node
says (two processes of four, above), or all cores of the instance.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from nxd_jax import interpreter
from nxd_jax.topology import INSTANCES, Topology


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="nxd-run", description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    found.add_argument("--instance", help=f"the machine to emulate: {', '.join(INSTANCES)}")
    found.add_argument("--nnodes", default="1", help="machines (default 1)")
    found.add_argument(
        "--nproc_per_node", "--nproc-per-node", type=int, help="ranks per machine (default: its cores; without --instance needed)"
    )
    found.add_argument("--lnc", type=int, choices=[1, 2], help="physical cores per logical core on Trn2 (default: the instance's)")
    found.add_argument("--topology", action="store_true", help="print the machine's picture before running")
    found.add_argument("--master_addr", "--master-addr", default="127.0.0.1", help=argparse.SUPPRESS)
    found.add_argument("--master_port", "--master-port", default="29500", help=argparse.SUPPRESS)
    for ignored in (
        "--node_rank",
        "--node-rank",
        "--rdzv_id",
        "--rdzv_backend",
        "--rdzv_endpoint",
        "--rdzv-id",
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--max_restarts",
        "--max-restarts",
        "--log_dir",
        "--log-dir",
    ):
        found.add_argument(ignored, help=argparse.SUPPRESS)
    found.add_argument("--standalone", action="store_true", help=argparse.SUPPRESS)
    found.add_argument("-m", "--module", action="store_true", help="the script is a module name, as with python -m")
    found.add_argument("script", help="the training script")
    found.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    return found


def environment(args: argparse.Namespace) -> tuple[dict[str, str], str]:
    """The variables to set, and one line that says what is emulated.

    Raises SystemExit, with a text that says why, for numbers that do not fit the machine.
    """
    nodes = _nodes(str(args.nnodes))
    variables: dict[str, str] = {}
    if args.instance:
        try:
            topology = Topology(args.instance, nodes=nodes, lnc=args.lnc)
        except ValueError as error:
            raise SystemExit(f"nxd-run: {error}") from None
        hosts, cores = topology.node_count, topology.cores_per_node
        local = args.nproc_per_node or cores
        if not 1 <= local <= cores:
            raise SystemExit(f"nxd-run: --nproc_per_node {local}: {args.instance} has {cores} cores per machine")
        variables |= {"NXD_JAX_INSTANCE": args.instance, "NXD_JAX_NNODES": str(nodes)}
        variables["NEURON_PLATFORM_TARGET_OVERRIDE"] = topology.platform_target
        if args.lnc:
            variables["NEURON_LOGICAL_NC_CONFIG"] = str(args.lnc)
        if local != cores:
            variables["NEURON_RT_NUM_CORES"] = str(local)
        machine = f"{nodes} x {args.instance}"
    else:
        if not args.nproc_per_node or args.nproc_per_node < 1:
            raise SystemExit("nxd-run: say how many ranks: --instance trn1.32xlarge, or --nproc_per_node 8")
        hosts, local, machine = nodes, args.nproc_per_node, f"{nodes} machine(s)"
    if _among_processes():
        return _of_one_process(variables, local, args.instance)
    count = hosts * local
    variables |= {
        "NXD_JAX_WORLD_SIZE": str(count),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(local),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "MASTER_ADDR": args.master_addr,
        "MASTER_PORT": args.master_port,
        "TORCHELASTIC_RUN_ID": "nxd-run",
    }
    return variables, f"nxd-run: {machine}, {count} ranks ({local} per machine) in one process"


def hosting(ranks: int, command: str) -> dict[str, str]:
    """The variables of one process that hosts so many ranks. command: what runs in it."""
    return environment(parser().parse_args(["--nproc_per_node", str(ranks), command]))[0]


def _among_processes() -> bool:
    """Whether torchrun (or whoever sets its variables) has started this process as one of several."""
    return (
        all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
        and "NXD_JAX_WORLD_SIZE" not in os.environ
    )


def _of_one_process(variables: dict[str, str], ranks: int, instance: str | None) -> tuple[dict[str, str], str]:
    """The variables of one of several processes that torchrun started, each with so many ranks, and the line that says so."""
    index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    beside, place = int(os.environ.get("LOCAL_WORLD_SIZE") or count), int(os.environ.get("LOCAL_RANK") or index)
    if instance:
        variables["NXD_JAX_NNODES"] = str(-(-count * ranks // Topology(instance).cores_per_node))
    variables |= {
        "NXD_JAX_WORLD_SIZE": str(count * ranks),
        "NXD_JAX_PROCESSES": str(count),
        "NXD_JAX_PROCESS": str(index),
        "WORLD_SIZE": str(count * ranks),
        "LOCAL_WORLD_SIZE": str(beside * ranks),
        "RANK": str(index * ranks),
        "LOCAL_RANK": str(place * ranks),
    }
    last = (index + 1) * ranks - 1
    return variables, f"nxd-run: ranks {index * ranks} to {last} of {count * ranks} in process {index} of {count}"


_TELLING = frozenset(
    f"--{name}"
    for name in (
        *("topology", "instance", "nnodes", "nproc_per_node", "nproc-per-node", "lnc"),
        *("abstract", "no-profile", "trace", "dump-hlo", "fail-if-over-hbm", "max-recompiles"),
    )
)
"""Options of the commands that hardly a script has."""


def after_the_script(of: argparse.ArgumentParser, args: argparse.Namespace) -> str | None:
    """A sentence about options of a command that stand after the script, which gets them; None if there are none, or they stand before it as well."""
    known = {o: action for action in of._actions for o in action.option_strings if o in _TELLING}
    after = (a.partition("=")[0] for a in args.args)
    found = [o for o in after if o in known and getattr(args, known[o].dest) == known[o].default]
    if not found:
        return None
    return f"{', '.join(found)} comes after {args.script}, so the script gets it: options of {of.prog} come before the script"


def _nodes(text: str) -> int:
    """torchrun's --nnodes: a number, or min:max, of which the larger counts."""
    last = text.split(":")[-1]
    if not last.isdigit() or not int(last):
        raise SystemExit(f"nxd-run: --nnodes {text}: must be a positive number")
    return int(last)


def main(argv: Sequence[str] | None = None) -> None:
    """The `nxd-run` command."""
    interpreter.use("nxd-run", "nxd_jax.run")
    args = parser().parse_args(argv)
    if (misplaced := after_the_script(parser(), args)) is not None:
        sys.stderr.write(f"nxd-run: {misplaced}\n")
    variables, line = environment(args)
    os.environ.update(variables)
    sys.stderr.write(line + "\n")
    if args.topology and args.instance:
        sys.stderr.write(f"{Topology.from_environment()}\n")
    sys.stderr.flush()
    sys.argv = [args.script, *args.args]
    if args.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        return
    if not os.path.exists(args.script):
        raise SystemExit(f"nxd-run: no such script: {args.script}")
    sys.path.insert(0, os.path.dirname(os.path.abspath(args.script)))
    runpy.run_path(args.script, run_name="__main__")


if __name__ == "__main__":
    main()
