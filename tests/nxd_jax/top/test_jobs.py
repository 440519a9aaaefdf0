"""Jobs that start, end, crash, restart and fall silent, on a clock of the test."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from nxd_jax.top import records
from nxd_jax.top.jobs import FORGOTTEN_AFTER, KEEP, SILENT_AFTER, Watch
from tests.nxd_jax.top.published import NOW, data, put


class Machine:
    """A folder of records, a clock, and which processes live."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.now = NOW
        self.lives: dict[int, str] = {}
        self.watch = self.another()

    def another(self) -> Watch:
        return Watch(lambda: [self.folder], clock=lambda: self.now, life=lambda r: self.lives.get(r.pid, records.LIVE))

    def put(self, pid: int, **changes: Any) -> pathlib.Path:
        return put(self.folder, data(pid=pid, **{"updated": self.now, **changes}))

    def seen(self, after: float = 0.0) -> dict[str, str]:
        """The state of each job, some seconds later."""
        self.now += after
        return {job.name: job.state for job in self.watch.look()}


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> Machine:
    return Machine(tmp_path)


def test_a_job_that_ends(machine: Machine) -> None:
    assert machine.seen() == {}
    file = machine.put(1)
    assert machine.seen() == {"1-1": "running"}
    file.unlink()
    machine.lives[1] = records.DEAD
    assert machine.seen(1) == {"1-1": "ended"}
    assert machine.seen(KEEP - 0.1) == {"1-1": "ended"}
    assert machine.seen(0.1) == {}


def test_a_job_whose_record_goes_before_it(machine: Machine) -> None:
    machine.put(1).unlink()
    file = machine.put(1)
    machine.seen()
    file.unlink()
    assert machine.seen(1) == {"1-1": "ended"}, "it is at its exit functions"


def test_a_job_that_is_killed(machine: Machine) -> None:
    file = machine.put(1, utilization=1.0)
    file.with_suffix(".tmp").write_text("{")
    assert machine.seen() == {"1-1": "running"}
    machine.lives[1] = records.DEAD
    assert machine.seen(1) == {"1-1": "crashed"}
    (job,) = machine.watch.look()
    assert [core.busy for core in job.cores] == [0.0] * 4
    assert machine.seen(KEEP - 0.1) == {"1-1": "crashed"} and file.exists()
    assert machine.seen(0.1) == {} and not list(machine.folder.iterdir())


def test_old_records_of_the_dead_are_not_shown(machine: Machine) -> None:
    machine.put(1, updated=NOW - KEEP)
    file = machine.put(2, updated=NOW - 1)
    machine.lives = {1: records.DEAD, 2: records.DEAD}
    assert machine.seen() == {"2-1": "crashed"}
    assert list(machine.folder.iterdir()) == [file]


def test_an_exception_is_told(machine: Machine) -> None:
    machine.put(1, error="ValueError")
    (job,) = machine.watch.look()
    assert (job.state, job.error) == ("crashed", "ValueError")


def test_a_torn_record_changes_nothing(machine: Machine) -> None:
    file = machine.put(1)
    machine.seen()
    file.write_text("{")
    assert machine.seen(1) == {"1-1": "running"}
    machine.lives[1] = records.DEAD
    assert machine.seen(1) == {"1-1": "crashed"}


@pytest.mark.parametrize("state", ["compiling", "running", "idle"])
def test_states_are_those_published(machine: Machine, state: str) -> None:
    machine.put(1, state=state)
    assert machine.seen() == {"1-1": state}


def test_silent_stopped_and_unknown_states(machine: Machine) -> None:
    machine.put(1, updated=NOW - SILENT_AFTER - 1)
    machine.put(2)
    machine.put(3, state="dancing")
    machine.lives[2] = records.STOPPED
    assert machine.seen() == {"1-1": "silent", "2-1": "stopped", "3-1": "idle"}


def test_processes_of_other_machines_go_by_their_records(machine: Machine) -> None:
    file = machine.put(1, machine="other")
    machine.lives[1] = records.FAR
    assert machine.seen() == {"1-1": "running"}
    assert machine.seen(SILENT_AFTER + 1) == {"1-1": "ended"}
    assert machine.seen(KEEP) == {} and machine.seen(1) == {} and file.exists(), "it may be heard of again"
    machine.seen(FORGOTTEN_AFTER)
    assert not file.exists()


def _worker(machine: Machine, pid: int, rank: int, **changes: Any) -> pathlib.Path:
    return machine.put(pid, world=2, hosted=[rank], job="run@host:1", **changes)


def test_processes_of_one_torchrun_are_one_job(machine: Machine) -> None:
    _worker(machine, 11, 1, utilization=0.5)
    _worker(machine, 10, 0, state="compiling")
    (job,) = machine.watch.look()
    assert [p.record.pid for p in job.processes] == [10, 11] and job.state == "compiling"
    assert [(core.rank, core.busy) for core in job.cores] == [(0, 0.75), (1, 0.5)]
    machine.lives[11] = records.DEAD
    assert machine.seen(1) == {"run@host:1": "crashed"}


def test_a_restart_takes_the_place_of_what_crashed(machine: Machine) -> None:
    _worker(machine, 10, 0)
    _worker(machine, 11, 1)
    machine.seen()
    machine.lives = {10: records.DEAD, 11: records.DEAD}
    assert machine.seen(1) == {"run@host:1": "crashed"}
    _worker(machine, 20, 0, started=NOW)
    assert [p.record.pid for p in machine.watch.look()[0].processes] == [20, 11]
    _worker(machine, 21, 1, started=NOW)
    assert machine.seen() == {"run@host:1": "running"}
    assert [p.record.pid for p in machine.watch.look()[0].processes] == [20, 21]


def test_jobs_stand_in_the_order_of_their_start(machine: Machine) -> None:
    machine.put(1, started=NOW)
    machine.put(2, started=NOW - 5)
    assert list(machine.seen()) == ["2-1", "1-1"]


@pytest.mark.parametrize(
    ("variables", "size", "name", "hbm"),
    [
        ({}, 2, "trn1.2xlarge", 16),
        ({}, 32, "trn1.32xlarge", 16),
        ({}, 999, None, 0),
        ({"NXD_JAX_INSTANCE": "trn2.48xlarge"}, 64, "trn2.48xlarge", 24),
        ({"NXD_JAX_INSTANCE": "trn2.48xlarge"}, 65, None, 0),
        ({"NXD_JAX_INSTANCE": "nonsense"}, 2, None, 0),
        ({"NEURON_RT_NUM_CORES": "8"}, 8, "trn1.32xlarge", 16),
    ],
)
def test_the_machine_and_its_memory(machine: Machine, variables: dict[str, str], size: int, name: str | None, hbm: int) -> None:
    machine.put(1, world=size, environment=variables)
    (job,) = machine.watch.look()
    assert (job.topology.instance.name if job.topology else None) == name
    assert {core.limit for core in job.cores} == {hbm * 2**30} and {core.used for core in job.cores} == {2**30}


def test_memory_of_real_devices_and_of_none(machine: Machine) -> None:
    machine.put(1, devices={"platform": "gpu", "count": 4, "limit": 99, "used": [1, 2, 3, 4]})
    machine.put(2, devices={})
    gpu, none = machine.watch.look()
    assert [(core.used, core.limit) for core in gpu.cores] == [(1, 99), (2, 99), (3, 99), (4, 99)]
    assert [core.used for core in none.cores] == [0] * 4
