"""Tells `nxd-top` what this process does: a small JSON file for each process, rewritten at most twice a second by a thread of its own.

The thread starts when the process compiles its first program, never keeps the process alive and never fails it: where the file cannot be written it
says so once, at debug level, and ends. A process that ends normally removes its file; one that is killed leaves it for `nxd-top` to find.
NXD_JAX_TOP=0 turns this off; NXD_JAX_TOP_DIR names the folder.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import pathlib
import random
import re
import socket
import stat
import sys
import tempfile
import threading
import time
from collections import deque
from typing import Any

from torch_bridge import metrics
from torch_bridge.config import fork_guard
from torch_bridge.config.variables import VARIABLES
from torch_bridge.telemetry.activity import ACTIVITY, Activity, Graph

VERSION = 1
"""Of the record: a reader leaves records of another version alone."""

WRITE_EVERY = 0.5
"""Seconds between two records of a process that works."""
BEAT_EVERY = 5.0
"""Seconds between two records of a process that does nothing."""
LOOK_EVERY = 0.05
"""Mean seconds between two looks at whether the device is busy, while programs run."""
MEASURE_EVERY = 2.0
"""Least seconds between two measurements of memory; more if one takes over a 200th of it."""
RECENT = 3.0
"""Seconds that the utilisation is an average of."""
IDLE_AFTER = 2.0
"""Seconds without a program until the process counts as idle."""
STEPS_WITHIN = 10.0
"""Seconds whose steps give the rate (more if steps take longer)."""
FORGOTTEN_AFTER = 3600.0
"""Seconds after which a record that nobody rewrote is removed by the next process."""

RECORD_FILE = re.compile(r"nxd-\d+-\d+\.(json|tmp)")
"""Names of records: the process, when it began to publish in milliseconds since the epoch; `tmp` while they are written."""

MACHINE_VARIABLES = (
    "NXD_JAX_INSTANCE",
    "NXD_JAX_NNODES",
    "NEURON_PLATFORM_TARGET_OVERRIDE",
    "NEURON_RT_NUM_CORES",
    "NEURON_RT_VISIBLE_CORES",
    "NEURON_LOGICAL_NC_CONFIG",
    "NEURON_RT_VIRTUAL_CORE_SIZE",
)
"""What says which machine is emulated; published as it is (this package knows no machines)."""

SESSIONS = ("IPython", "_pytest")
"""Modules of programs that go on after an exception and leave it where the interpreter leaves the one that ends a script."""

logger = logging.getLogger("nxd_jax")
_publisher: Publisher | None = None
_decided = False


def start() -> bool:
    """Start to publish unless NXD_JAX_TOP=0 or in a forked child; whether this process publishes. Cheap when it has been decided."""
    global _publisher, _decided
    if not _decided:
        _decided = True
        if VARIABLES["NXD_JAX_TOP"].now() is not False and not fork_guard.is_forked():
            _publisher = Publisher(ACTIVITY)
            _publisher.begin()
    return _publisher is not None and not _publisher.ended


class Publisher:
    """Samples an `Activity` and writes the record of this process.

    folder: where; default `usable_folder()`. ended: it writes no more.
    """

    def __init__(self, activity: Activity, folder: pathlib.Path | None = None):
        self.activity = activity
        self.folder = folder
        self.file: pathlib.Path | None = None
        self.ended = False
        self.busy_seconds = 0.0
        self.started = time.time()
        self._owner = os.getpid()
        self._ticks = start_ticks(os.getpid())
        self._thread = threading.Thread(target=self._loop, name="nxd-top-publisher", daemon=True)
        self._stop = threading.Event()
        self._random = random.Random()
        self._looked = self._active = self._wrote = self._measured = time.monotonic()
        self._history: deque[tuple[float, float]] = deque([(self._looked, 0.0)])
        self._programs = activity.programs

    # -- the thread ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the thread; the file goes when the process ends."""
        try:
            self._thread.start()
        except RuntimeError as error:  # as many threads as there may be
            self._give_up(error)
        else:
            atexit.register(self.close)

    def _loop(self) -> None:
        try:
            self.open()
            self.write()
            while not self._stop.wait(self._pause()):
                self.look(time.monotonic())
                if self._due(time.monotonic()):
                    self.write()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.ended = True
        logger.debug(
            "nxd-top will not show this process: %s: %s (NXD_JAX_TOP_DIR names the folder of the records, NXD_JAX_TOP=0 turns them off)",
            type(error).__name__,
            error,
        )

    def _pause(self) -> float:
        """Seconds until the next look: at random, so that looks and steps of one length do not keep time."""
        if time.monotonic() - self._active < IDLE_AFTER:
            return LOOK_EVERY * self._random.uniform(0.5, 1.5)
        return WRITE_EVERY

    def _due(self, now: float) -> bool:
        working = now - self._active < IDLE_AFTER + RECENT  # long enough for the utilization to fall to 0
        return now - self._wrote >= (WRITE_EVERY if working else BEAT_EVERY)

    def close(self) -> None:
        """Stop, and remove the file; after an uncaught exception it stays, with the exception's name. Does nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)
        if self.file is None or self.ended:
            return
        self.ended = True
        failure = _uncaught()
        with contextlib.suppress(OSError):
            if failure is None:
                self.file.unlink(missing_ok=True)
            else:
                self.write(type(failure).__name__)

    # -- looking and writing -------------------------------------------------------------------------

    def open(self) -> None:
        """Choose the file, and remove what processes left that were killed long ago. OSError if there is no folder for it."""
        folder = self.folder or usable_folder()
        remove_forgotten(folder, time.time())
        self.file = folder / f"nxd-{self._owner}-{int(self.started * 1000)}.json"

    def look(self, now: float) -> None:
        """Note whether the device is busy, for all the time since the last look; `now` in `time.monotonic` seconds."""
        did = self.activity
        busy = did.busy()
        if busy:
            slept = self._looked - self._active >= IDLE_AFTER  # then it was idle for most of the pause
            self.busy_seconds += min(now - self._looked, LOOK_EVERY) if slept else now - self._looked
        self._looked = now
        if busy or did.compiling is not None or did.programs != self._programs:
            self._programs = did.programs
            self._active = now
            if now - self._measured >= max(MEASURE_EVERY, 200 * did.devices.seconds if did.devices else 0):
                self._measured = now
                did.asked = True
        if now - self._history[-1][0] >= WRITE_EVERY / 2:
            self._history.append((now, self.busy_seconds))
            while len(self._history) > 2 and now - self._history[1][0] >= RECENT:
                self._history.popleft()

    def write(self, error: str = "") -> None:
        """Replace the file by one with the present record. error: the name of the exception that ends the process. OSError where that cannot be done."""
        if self.file is None:
            return
        self._wrote = time.monotonic()
        draft = self.file.with_suffix(".tmp")
        draft.write_text(json.dumps(self.record(error), separators=(",", ":")))
        os.replace(draft, self.file)

    def record(self, error: str = "") -> dict[str, Any]:
        """What is published; docs/reference/nxd_top.md lists it."""
        now, did = time.monotonic(), self.activity
        compiling, counters = did.compiling, dict(metrics.COUNTERS)
        return {
            "version": VERSION,
            "pid": self._owner,
            "ticks": self._ticks,
            "machine": machine(),
            "job": self._job(),
            "script": script_name(),
            "started": self.started,
            "updated": time.time(),
            "error": error,
            "state": self._state(now),
            "world": _world(did),
            "environment": {name: os.environ[name] for name in MACHINE_VARIABLES if os.environ.get(name)},
            "devices": _devices(did),
            "programs": did.programs,
            "busy_seconds": round(self.busy_seconds, 3),
            "utilization": round(self.utilization(now), 3),
            "steps": did.steps,
            "steps_per_second": steps_per_second(list(did.step_times), now),
            "compiling": None if compiling is None else {**_graph(compiling[0]), "since": compiling[1]},
            "graph": None if did.graph is None else {**_graph(did.graph), "ran_at": did.ran_at},
            "compiles": counters.get("UncachedCompile", 0),
            "compile_seconds": round(metrics.COMPILE_TIME.total, 3),
            "cache_hits": counters.get("CachedCompile", 0),
            "disk_cache_hits": counters.get("PersistentCacheHit", 0),
            "fallback_ops": sum(count for name, count in counters.items() if name.startswith("aten::")),
        }

    def utilization(self, now: float) -> float:
        """The part of the last seconds in which the device was busy, 0 to 1."""
        since, busy_then = self._history[0]
        return min(1.0, (self.busy_seconds - busy_then) / max(now - since, 1e-3))

    def _state(self, now: float) -> str:
        if self.activity.compiling is not None:
            return "compiling"
        return "running" if now - self._active < IDLE_AFTER else "idle"

    def _job(self) -> str:
        """The same for all processes of one torchrun job, and for no other."""
        of, env = self.activity.world, os.environ
        if of is None or of.processes == 1:
            return f"{self._owner}-{int(self.started * 1000)}"
        return f"{env.get('TORCHELASTIC_RUN_ID', '')}@{env.get('MASTER_ADDR', '')}:{env.get('MASTER_PORT', '')}"


def steps_per_second(times: list[float], now: float) -> float | None:
    """The rate of steps that ended at these times (`time.monotonic` seconds, ascending); falls while no more come. None before the second."""
    recent = [t for t in times if now - t <= STEPS_WITHIN]
    recent = recent if len(recent) > 1 else times[-2:]
    if len(recent) < 2 or recent[-1] <= recent[0]:
        return None
    rate = (len(recent) - 1) / (recent[-1] - recent[0])
    return round(min(rate, 1 / max(now - recent[-1], 1e-9)), 4)


# -- parts of the record ---------------------------------------------------------------------------


def _graph(of: Graph) -> dict[str, Any]:
    return {"name": of.name, "ops": of.ops, "source": of.source, "core_bytes": of.core_bytes}


def _world(did: Activity) -> dict[str, Any]:
    of = did.world
    if of is None:
        return {"size": 1, "hosted": [0], "axes": {}, "local_size": 1}
    return {"size": of.size, "hosted": of.hosted, "axes": of.axes, "local_size": of.local_size}


def _devices(did: Activity) -> dict[str, Any]:
    of = did.devices
    return {"platform": of.platform, "count": of.count, "limit": of.limit, "used": of.used} if of is not None else {}


def script_name() -> str:
    """The script's file name, the package's name for `python -m package`, "python" for neither. No arguments: they may hold secrets."""
    path = pathlib.PurePath(sys.argv[0]) if sys.argv else pathlib.PurePath()
    return (path.parent.name if path.name == "__main__.py" else path.name) or "python"


def machine() -> str:
    """Where process numbers mean what they mean here: the host, and on Linux the PID namespace (containers share folders, not processes)."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did, so that a later process with its number is told apart. None where /proc is not."""
    try:
        return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _uncaught() -> BaseException | None:
    """The exception that ended the script, if one did: the interpreter keeps it. Ctrl-C is no failure, and sessions go on after one."""
    if hasattr(sys, "ps1") or any(name in sys.modules for name in SESSIONS):
        return None
    found = getattr(sys, "last_value", None)
    return found if isinstance(found, Exception) else None


# -- the folder ------------------------------------------------------------------------------------


def folders() -> list[pathlib.Path]:
    """Where records may go, best first: NXD_JAX_TOP_DIR alone, else `$XDG_RUNTIME_DIR/nxd_jax` and a folder of this user among the temporary files."""
    named = os.environ.get("NXD_JAX_TOP_DIR")
    if named:
        return [pathlib.Path(named).expanduser()]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    shared = pathlib.Path(tempfile.gettempdir()) / f"nxd_jax-{os.getuid()}"
    return [pathlib.Path(runtime) / "nxd_jax", shared] if runtime else [shared]


def usable_folder() -> pathlib.Path:
    """The first of `folders()` that is there or can be made, and that is this user's alone (unless NXD_JAX_TOP_DIR names it). OSError if none is."""
    problems = []
    for folder in folders():
        try:
            folder.mkdir(mode=0o700, parents=bool(os.environ.get("NXD_JAX_TOP_DIR")), exist_ok=True)
            found = folder.lstat()
            if not os.environ.get("NXD_JAX_TOP_DIR") and not _private(found):
                raise OSError(f"{folder} is not a folder of this user with mode 700, so others could put files into it")
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
            raise OSError(f"{folder} cannot be written")
        except OSError as error:
            problems.append(str(error))
    raise OSError("; ".join(problems))


def _private(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def remove_forgotten(folder: pathlib.Path, now: float) -> None:
    """Remove the records that nobody has rewritten for an hour: their processes were killed. `now` in seconds since the epoch."""
    for file in folder.iterdir():
        if RECORD_FILE.fullmatch(file.name):
            with contextlib.suppress(OSError):
                if now - file.stat().st_mtime > FORGOTTEN_AFTER:
                    file.unlink()
