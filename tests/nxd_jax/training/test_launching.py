"""Which ranks a process hosts."""

from __future__ import annotations

import os
from typing import Any

import pytest
from omegaconf import OmegaConf

from nxd_jax.training import launching

pytestmark = pytest.mark.usefixtures("variables")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "NXD_JAX_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)


def prepare(devices: Any, nodes: int = 1, lnc: Any = None, **environ: str) -> str:
    os.environ.update(environ)
    return launching.prepare(OmegaConf.create({"trainer": {"devices": devices, "num_nodes": nodes, "lnc": lnc}}))


def said(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def test_alone_it_hosts_all_ranks_of_a_machine_that_has_so_many_cores() -> None:
    assert prepare(32, 2) == "nxdt-train: 2 x trn1.32xlarge, 64 ranks (32 per machine) in one process"
    assert said("NXD_JAX_WORLD_SIZE", "NXD_JAX_INSTANCE", "NXD_JAX_NNODES") == ["64", "trn1.32xlarge", "2"]


def test_a_trn2_with_two_physical_cores_for_each_logical_one() -> None:
    assert "1 x trn2.48xlarge, 64 ranks" in prepare(64, lnc=2)
    assert said("NEURON_LOGICAL_NC_CONFIG") == ["2"]


def test_other_numbers_of_cores() -> None:
    assert prepare(6) == "nxdt-train: 1 machine(s), 6 ranks (6 per machine) in one process"
    assert "NXD_JAX_INSTANCE" not in os.environ


def test_under_torchrun_with_a_process_for_each_rank() -> None:
    found = prepare(2, 1, RANK="1", WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="1")
    assert found == "nxdt-train: rank 1 of 2, one in each process" and "NXD_JAX_WORLD_SIZE" not in os.environ


def test_under_torchrun_with_several_ranks_in_each_process() -> None:
    found = prepare(4, 1, RANK="1", WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="1", LOCAL_WORLD_SIZE="2", LOCAL_RANK="1")
    assert found == "nxdt-train: ranks 2 to 3 of 4 in process 1 of 2"
    assert said("NXD_JAX_PROCESSES", "RANK", "WORLD_SIZE") == ["2", "2", "4"]


def test_under_nxd_run() -> None:
    assert prepare(4, 1, NXD_JAX_WORLD_SIZE="4") == "nxdt-train: 4 ranks, as nxd-run said"


def test_slurm_and_mpi() -> None:
    slurm = {
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS_PER_NODE": "1(x2)",
        "SLURM_JOB_NODELIST": "first,second",
    }
    assert prepare(2, 2, **slurm) == "nxdt-train: ranks 2 to 3 of 4 in process 1 of 2"
    assert said("MASTER_ADDR", "MASTER_PORT") == ["first", "41000"]


def test_mpi() -> None:
    mpi = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "MASTER_ADDR": "host"}
    assert prepare(2, 1, **mpi) == "nxdt-train: rank 0 of 2, one in each process"
    assert said("RANK", "WORLD_SIZE", "MASTER_ADDR") == ["0", "2", "host"]


def test_what_cannot_be_shared_out() -> None:
    with pytest.raises(ValueError, match=r"trainer.devices=4 on trainer.num_nodes=1 are 4 ranks, and 3 processes were started"):
        prepare(4, 1, RANK="0", WORLD_SIZE="3", MASTER_ADDR="a", MASTER_PORT="1")


def test_nodes_that_cannot_be_read() -> None:
    slurm = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "PATH": "/nowhere"}
    with pytest.raises(ValueError, match="MASTER_ADDR is not set: set it to the address"):
        prepare(2, 1, **slurm)
    with pytest.raises(ValueError, match=r"SLURM_JOB_NODELIST=n\[1-2\] cannot be read"):
        prepare(2, 1, SLURM_JOB_NODELIST="n[1-2]", **slurm)
