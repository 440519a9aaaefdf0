"""The records that processes publish for `nxd-top`: where they are, what they say, and whether the process that wrote one still lives."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = 1
"""The version of records that is understood."""

FILE = re.compile(r"nxd-(\d+)-\d+\.json")
"""Names of records: the process, and when it began to publish."""

LIVE, STOPPED, DEAD, FAR = "live", "stopped", "dead", "far"
"""A process that runs; that is suspended; that is gone; of another machine or container, so that nobody here can say."""


@dataclass(frozen=True)
class Graph:
    """A program. name: 8 hex digits. ops: aten ops in it. source: 'file.py:line' or ''. core_bytes: memory it needs on each core, 0 if unknown.

    at: when it ran, or since when it is being compiled, in seconds since the epoch.
    """

    name: str
    ops: int
    source: str
    core_bytes: int
    at: float


@dataclass(frozen=True)
class Record:
    """What one process said last; times in seconds since the epoch, sizes in bytes. docs/reference/nxd_top.md has the meanings."""

    pid: int
    ticks: int | None
    machine: str
    job: str
    script: str
    started: float
    updated: float
    error: str
    state: str
    world_size: int
    local_size: int
    hosted: tuple[int, ...]
    axes: dict[str, int]
    environment: dict[str, str]
    platform: str
    device_count: int
    memory: tuple[int, ...]
    memory_limit: int
    programs: int
    busy_seconds: float
    utilization: float
    steps: int
    steps_per_second: float | None
    compiling: Graph | None
    graph: Graph | None
    compiles: int
    compile_seconds: float
    cache_hits: int
    disk_cache_hits: int
    fallback_ops: int

    @classmethod
    def of(cls, data: Any) -> Record:
        """From the published JSON. ValueError, TypeError, KeyError or AttributeError if that is something else."""
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']}, not {VERSION}")
        world, devices = data["world"], data["devices"]
        hosted = tuple(int(rank) for rank in world["hosted"])
        if not hosted or not all(0 <= rank < int(world["size"]) for rank in hosted):
            raise ValueError(f"ranks {hosted} of a world of {world['size']}")
        return cls(
            pid=int(data["pid"]),
            ticks=None if data["ticks"] is None else int(data["ticks"]),
            machine=str(data["machine"]),
            job=_line(data["job"]),
            script=_line(data["script"]),
            started=_number(data["started"]),
            updated=_number(data["updated"]),
            error=_line(data["error"]),
            state=_line(data["state"]),
            world_size=int(world["size"]),
            local_size=int(world["local_size"]),
            hosted=hosted,
            axes={_line(name): int(count) for name, count in world["axes"].items()},
            environment={str(name): str(value) for name, value in data["environment"].items()},
            platform=_line(devices.get("platform", "")),
            device_count=int(devices.get("count", 0)),
            memory=tuple(int(n) for n in devices.get("used", ())),
            memory_limit=int(devices.get("limit", 0)),
            programs=int(data["programs"]),
            busy_seconds=_number(data["busy_seconds"]),
            utilization=min(1.0, max(0.0, _number(data["utilization"]))),
            steps=int(data["steps"]),
            steps_per_second=None if data["steps_per_second"] is None else _number(data["steps_per_second"]),
            compiling=_graph(data["compiling"], "since"),
            graph=_graph(data["graph"], "ran_at"),
            compiles=int(data["compiles"]),
            compile_seconds=_number(data["compile_seconds"]),
            cache_hits=int(data["cache_hits"]),
            disk_cache_hits=int(data["disk_cache_hits"]),
            fallback_ops=int(data["fallback_ops"]),
        )


def _graph(data: Any, time: str) -> Graph | None:
    if data is None:
        return None
    return Graph(_line(data["name"]), int(data["ops"]), _line(data["source"]), int(data["core_bytes"]), _number(data[time]))


def _line(text: object) -> str:
    """One line without anything that a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def _number(value: Any) -> float:
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{value} is no finite number")
    return number


# -- files -----------------------------------------------------------------------------------------


def folders(named: str | None = None, environ: Mapping[str, str] | None = None) -> list[Path]:
    """Where processes of this user publish: the folder that is `named` or NXD_JAX_TOP_DIR alone; else every place that one of them may have chosen.

    Processes may have an environment that differs from ours (XDG_RUNTIME_DIR, TMPDIR), so those places are named here whatever ours says.
    """
    environ = os.environ if environ is None else environ
    named = named or environ.get("NXD_JAX_TOP_DIR")
    if named:
        return [Path(named).expanduser()]
    user = os.getuid()
    runtime = [Path(environ["XDG_RUNTIME_DIR"])] if environ.get("XDG_RUNTIME_DIR") else []
    temporary = (Path(tempfile.gettempdir()), Path("/tmp"))
    places = [*(p / "nxd_jax" for p in (*runtime, Path(f"/run/user/{user}"))), *(p / f"nxd_jax-{user}" for p in temporary)]
    return [place for place in dict.fromkeys(places) if _is_ours(place)]


def _is_ours(place: Path) -> bool:
    """Whether a folder is there and nobody else can put files into it."""
    try:
        found = place.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def published(places: Sequence[Path]) -> Iterator[tuple[Path, Any]]:
    """Each record's file and JSON, as it is; files that are torn, or no records at all, are passed over."""
    for place in places:
        try:
            files = sorted(place.iterdir())
        except OSError:
            continue
        for file in files:
            if FILE.fullmatch(file.name):
                try:
                    yield file, json.loads(file.read_text())
                except (OSError, ValueError, RecursionError):
                    continue


def read(places: Sequence[Path]) -> Iterator[tuple[Path, Record]]:
    """Each record with its file; what is no record of this version is passed over."""
    for file, data in published(places):
        try:
            yield file, Record.of(data)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            continue


# -- processes -------------------------------------------------------------------------------------


def machine() -> str:
    """This host and, on Linux, this PID namespace, in the words of `torch_bridge.telemetry.publisher.machine`."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def life(record: Record, stat_of: Callable[[int], str] | None = None) -> str:
    """LIVE, STOPPED, DEAD or FAR. A process with the same number that started at another time is another one; a zombie is dead."""
    if record.machine != machine():
        return FAR
    try:
        fields = (stat_of or _stat)(record.pid).rpartition(")")[2].split()
        state, ticks = fields[0], int(fields[19])
    except FileNotFoundError:
        return DEAD if Path("/proc/self/stat").exists() or not answers(record.pid) else LIVE
    except (OSError, ValueError, IndexError):
        return LIVE if answers(record.pid) else DEAD
    if state in "ZX" or record.ticks not in (None, ticks):
        return DEAD
    return STOPPED if state in "Tt" else LIVE


def _stat(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text()


def answers(pid: int) -> bool:
    """Whether a process has this number, where /proc does not say."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
