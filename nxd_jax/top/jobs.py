"""Jobs as `nxd-top` follows them: the processes of one torchrun are one job, and what ended or crashed stays in sight for a while."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from nxd_jax.top import records
from nxd_jax.top.records import DEAD, FAR, LIVE, STOPPED, Record
from nxd_jax.topology import Topology
from nxd_jax.topology import environment as settings

KEEP = 10.0
"""Seconds for which a job that ended or crashed is still shown."""
SILENT_AFTER = 15.0
"""Seconds without a record after which a process says nothing any more (idle ones write every 5 s)."""
FORGOTTEN_AFTER = 3600.0
"""Seconds after which the record of another machine's process is removed."""

GONE = ("ended", "crashed")
STATES = ("crashed", "compiling", "running", "stopped", "silent", "idle", "ended")
"""What a process may be doing, the most telling first: that is what its job is said to do."""


@dataclass(frozen=True)
class Process:
    """A process as it is shown. state: one of `STATES`. gone: since when it is dead, in seconds of the clock; None while it lives."""

    record: Record
    state: str
    gone: float | None = None


@dataclass(frozen=True)
class Core:
    """A logical core: its rank, the part of the last seconds in which it was busy, bytes in use and bytes it has (0: not known)."""

    rank: int
    busy: float
    used: int
    limit: int


@dataclass(frozen=True)
class Job:
    """The processes of one job on this machine, in the order of their ranks."""

    name: str
    processes: tuple[Process, ...]

    @property
    def record(self) -> Record:
        """That of the first process, which speaks for the job."""
        return self.processes[0].record

    @property
    def state(self) -> str:
        """The most telling state of its processes."""
        return min((p.state for p in self.processes), key=STATES.index)

    @property
    def error(self) -> str:
        """The exception that ended a process, if known: its class name, else ''."""
        return next((p.record.error for p in self.processes if p.record.error), "")

    @property
    def topology(self) -> Topology | None:
        """The emulated machine, if there is one that has these cores."""
        return _topology(tuple(sorted(self.record.environment.items())), self.record.world_size, self.record.local_size)

    @property
    def cores(self) -> list[Core]:
        """The cores of its processes by rank. The processes say how busy; all cores of one run the same programs."""
        topology, found = self.topology, []
        for process in self.processes:
            record = process.record
            limit = record.memory_limit or (topology.hbm_per_core if topology else 0)
            busy = 0.0 if process.state in (*GONE, "stopped") else record.utilization
            memory = record.memory if len(record.memory) == len(record.hosted) else (0,) * len(record.hosted)
            found += [Core(rank, busy, used, limit) for rank, used in zip(record.hosted, memory, strict=True)]
        return sorted(found, key=lambda core: core.rank)


@lru_cache(maxsize=64)
def _topology(variables: tuple[tuple[str, str], ...], world_size: int, local_size: int) -> Topology | None:
    """The machine that a process's variables describe; without any that say how many cores, the smallest one with `local_size` of them."""
    environ = dict(variables)
    if not environ.keys() & {"NXD_JAX_INSTANCE", "NEURON_RT_NUM_CORES", "NEURON_RT_VISIBLE_CORES"}:
        environ["NEURON_RT_NUM_CORES"] = str(local_size)
    try:
        found = settings.read(environ)
        topology = Topology(found.instance, found.nodes, found.lnc, found.visible)
    except ValueError:
        return None
    return topology if world_size <= topology.core_count else None


class Watch:
    """Looks at the records again and again.

    places: folders of records. keep: seconds for which a dead process is shown. clock: seconds since the epoch. life: whether a record's process lives.
    """

    def __init__(
        self,
        places: Callable[[], Sequence[Path]],
        keep: float = KEEP,
        clock: Callable[[], float] = time.time,
        life: Callable[[Record], str] = records.life,
    ) -> None:
        self._places = places
        self._keep = keep
        self._clock = clock
        self._life = life
        self._known: dict[Path, Process] = {}

    def look(self) -> list[Job]:
        """The jobs now, oldest first. Removes the records of dead processes that have been shown long enough."""
        now = self._clock()
        there = dict(records.read(self._places()))
        for file, record in there.items():
            self._known[file] = self._judged(file, record, now)
        for file, process in list(self._known.items()):
            if file not in there and process.gone is None:
                self._known[file] = process = self._without_record(file, process, now)
            if process.gone is not None and now - process.gone >= self._keep:
                del self._known[file]
                if file in there:
                    _remove(file, process.record, now)
        return _grouped(self._known.values())

    def _judged(self, file: Path, record: Record, now: float) -> Process:
        """A process with a record."""
        life, before = self._life(record), self._known.get(file)
        if life == DEAD or record.error or (life == FAR and now - record.updated > SILENT_AFTER):
            state = "ended" if life == FAR and not record.error else "crashed"
            since = before.gone if before and before.gone is not None else now if before else min(now, record.updated)
            return Process(record, state, since)
        if life == STOPPED:
            return Process(record, "stopped")
        silent = now - record.updated > SILENT_AFTER
        return Process(record, "silent" if silent else record.state if record.state in STATES else "idle")

    def _without_record(self, file: Path, process: Process, now: float) -> Process:
        """A process whose record was there and is not any more: it ended; or the file is torn just now, or somebody removed it."""
        if file.exists() and self._life(process.record) in (LIVE, STOPPED):
            return process
        return replace(process, state="crashed" if file.exists() else "ended", gone=now)


def _remove(file: Path, record: Record, now: float) -> None:
    """Delete the record of a dead process, and what it was about to write. One of another machine is left for an hour: it may be heard of again."""
    if record.machine != records.machine() and now - record.updated < FORGOTTEN_AFTER:
        return
    for path in (file, file.with_suffix(".tmp")):
        with contextlib.suppress(OSError):
            path.unlink()


def _grouped(processes: Iterable[Process]) -> list[Job]:
    """Processes by job, oldest first; without those that died and whose ranks another process of the job has taken over (a restart)."""
    by_name: dict[str, list[Process]] = {}
    for process in sorted(processes, key=lambda p: (p.gone is None, p.record.started), reverse=True):
        of_job = by_name.setdefault(process.record.job, [])
        taken = {rank for p in of_job for rank in p.record.hosted}
        if process.gone is None or taken.isdisjoint(process.record.hosted):
            of_job.append(process)
    jobs = [Job(name, tuple(sorted(of_job, key=lambda p: p.record.hosted[:1]))) for name, of_job in by_name.items()]
    return sorted(jobs, key=lambda job: min(p.record.started for p in job.processes))
