"""Which ranks this process hosts for a configuration, and on which machine: decided before anything asks for a device.

| started by | ranks of this process |
|---|---|
| nothing (`nxdt-train x.yaml`) | all `trainer.devices * trainer.num_nodes` |
| nxd-run | those of nxd-run |
| torchrun, srun, mpirun with as many processes as there are ranks | one |
| the same with fewer processes (one for each machine, say) | an equal share |
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from nxd_jax import run

MACHINES = {32: ("trn1.32xlarge", None), 64: ("trn2.48xlarge", 2), 128: ("trn2.48xlarge", 1)}
"""By `trainer.devices`: the machine that has so many (logical) cores, and its lnc."""

_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID", "LOCAL_WORLD_SIZE": "SLURM_NTASKS_PER_NODE"}
_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_PORT = "41000"
"""The original's MASTER_PORT."""


def prepare(cfg: DictConfig) -> str:
    """Set the variables that say which ranks this process hosts; returns a line that says it too.

    Raises ValueError if the processes that were started cannot share the ranks out.
    """
    devices, nodes = cfg.trainer.get("devices", "auto"), int(cfg.trainer.get("num_nodes") or 1)
    variables = _of_cluster(os.environ)
    os.environ.update(variables)
    if "NXD_JAX_WORLD_SIZE" in os.environ:
        return f"nxdt-train: {os.environ['NXD_JAX_WORLD_SIZE']} ranks, as nxd-run said"
    if not isinstance(devices, int):
        return f"nxdt-train: trainer.devices={devices}"
    processes = int(os.environ.get("WORLD_SIZE") or 1)
    instance, lnc = machine(devices, cfg.trainer.get("lnc"))
    if processes == devices * nodes and processes > 1:
        if instance:
            os.environ.setdefault("NXD_JAX_INSTANCE", instance)
            os.environ.setdefault("NXD_JAX_NNODES", str(nodes))
        return f"nxdt-train: rank {os.environ.get('RANK')} of {processes}, one in each process"
    if devices * nodes % processes:
        raise ValueError(
            f"trainer.devices={devices} on trainer.num_nodes={nodes} are {devices * nodes} ranks, and {processes} processes were started, which cannot share "
            "them out equally: start as many as there are ranks, or a number that divides them"
        )
    options = ["--nnodes", str(nodes)]
    if instance:
        options += ["--instance", instance] + (["--lnc", str(lnc)] if lnc else [])
    if processes > 1:
        options += ["--nproc_per_node", str(devices * nodes // processes)]
    elif not instance:
        options += ["--nproc_per_node", str(devices)]
    given, line = run.environment(run.parser().parse_args([*options, "nxdt-train"]))
    os.environ.update(given)
    return line.replace("nxd-run:", "nxdt-train:")


def machine(devices: int, lnc: Any = None) -> tuple[str | None, int | None]:
    """The machine with so many cores, and its lnc; (None, None) for other numbers."""
    found = MACHINES.get(devices, (None, None))
    if found[0] is not None and found[1] is not None and lnc not in (None, found[1]):
        return (None, None)
    return found


def _of_cluster(environ: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables, from those of SLURM or Open MPI, if torchrun's are not there."""
    if environ.get("RANK") is not None:
        return {}
    for table, count in ((_SLURM, "SLURM_NTASKS"), (_MPI, "OMPI_COMM_WORLD_SIZE")):
        if int(environ.get(count) or 1) > 1 and environ.get(table["RANK"]) is not None:
            found = {name: environ[source].split("(")[0] for name, source in table.items() if environ.get(source)}
            found.setdefault("MASTER_ADDR", environ.get("MASTER_ADDR") or _first_host(environ))
            found.setdefault("MASTER_PORT", environ.get("MASTER_PORT") or _PORT)
            return found
    return {}


def _first_host(environ: Mapping[str, str]) -> str:
    names = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if names is None:
        raise ValueError("MASTER_ADDR is not set: set it to the address of the first process's machine")
    if "[" not in names:
        return names.split(",")[0]
    try:
        return subprocess.run(["scontrol", "show", "hostnames", names], capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise ValueError(f"SLURM_JOB_NODELIST={names} cannot be read ({error}): set MASTER_ADDR to the first machine's address") from error
