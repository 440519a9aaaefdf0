"""`profile`: JAX's profiler around some steps, and the trace read back."""

from __future__ import annotations

import atexit
import contextlib
import glob
import gzip
import inspect
import itertools
import logging
import os
import pathlib
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from nxd_jax.inspect.profiling import reading, summary, watching
from nxd_jax.inspect.profiling.results import Profile

logger = logging.getLogger("nxd_jax")

_lock = threading.Lock()
_running = ""
_numbers = itertools.count(1)
_METADATA = re.compile(rb'"metadata":\{[^{}]*\},')


@contextlib.contextmanager
def profile(
    folder: str | os.PathLike[str] | None = None,
    steps: int | range | None = None,
    *,
    python: bool = False,
    limit: float | None = reading.LIMIT,
) -> Iterator[Profile]:
    """Record what the block does, and where its time goes: `with nxd_jax.inspect.profile() as found:`, then `print(found)`.

    On the host it tells recording, compiling, dispatching and waiting apart; on the devices it gives the time to programs, modules, source lines and aten ops,
    through the metadata of the optimised HLO. At the end it waits for the devices. It stands for `neuron-profile` and `torch_xla.debug.profiler`, whose traces
    these are too.

    folder: where the trace goes, made if it is missing; default a new folder among the temporary files, removed when this process ends.
    steps: None: all of the block; a number: that many first steps, and the rest runs unrecorded; a range: those steps, counted from 0, so that `range(2, 5)`
    leaves two to warm up.
    python: Python's function calls are in the trace too, which makes it much larger and the host slower. limit: seconds that reading the trace may take
    (default 60; None: any); what it leaves out, `notes` tells.

    The profile is filled when the block ends, also when it raises (the exception goes through). Raises RuntimeError if a profile or another trace is being
    recorded, OSError for a folder that cannot be written, ValueError or TypeError for steps that are none.
    """
    wanted = _wanted(steps)
    with _alone():
        recording = Recording(_usable(folder), wanted, python)
        found = Profile(folder=str(recording.folder), kept=folder is not None)
        failure: BaseException | None = None
        try:
            with recording:
                yield found
        except BaseException as error:
            failure = error
            raise
        finally:
            with _unless_failed(failure):
                vars(found).update(vars(recording.result(failure, limit)) | {"kept": folder is not None})


def _caller() -> str:
    """'file:line' of the code that uses the profile."""
    frame = inspect.currentframe()
    while frame is not None and (
        frame.f_globals.get("__name__", "").startswith("nxd_jax.inspect.") or frame.f_code.co_filename == contextlib.__file__
    ):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _wanted(steps: int | range | None) -> range | None:
    if steps is None:
        return None
    if isinstance(steps, bool) or not isinstance(steps, (int, range)):
        raise TypeError(f"steps must be None, a number of steps or a range such as range(2, 5), got {steps!r}")
    wanted = range(steps) if isinstance(steps, int) else steps
    if not wanted or wanted.step != 1 or wanted.start < 0:
        raise ValueError(
            f"steps must name at least one step, in a row and from 0 on: a number such as 3 or a range such as range(2, 5), got {steps!r}"
        )
    return wanted


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    global _running
    with _lock:
        if _running:
            raise RuntimeError(f"a profile is being recorded already, begun at {_running}: JAX records one at a time. End that block first")
        _running = _caller()
    try:
        yield
    finally:
        _running = ""


@contextlib.contextmanager
def _unless_failed(failure: BaseException | None) -> Iterator[None]:
    """What goes wrong here is only told if the block itself failed: its exception is the one to see."""
    try:
        yield
    except Exception as error:
        if failure is None:
            raise
        logger.warning("the profile of a block that failed could not be read: %s: %s", type(error).__name__, error)


def _usable(folder: str | os.PathLike[str] | None) -> pathlib.Path:
    """The folder, there and writable."""
    if folder is None:
        made = tempfile.mkdtemp(prefix="nxd_jax-profile-")
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        return pathlib.Path(made)
    place = pathlib.Path(folder).expanduser().absolute()
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise type(error)(
            error.errno,
            f"a profile cannot be written to {place} ({error.strerror}): name another folder, or none for one among the temporary files",
        ) from error
    return place


class Recording(contextlib.AbstractContextManager["Recording"]):
    """One use of JAX's profiler, watched. folder: where it writes; wanted: the steps to record, None for all; python: whether Python's calls are traced."""

    def __init__(self, folder: pathlib.Path, wanted: range | None, python: bool):
        self.folder = folder
        self.wanted = wanted
        self.python = python
        self.steps = 0
        self.recorded = False
        self.active = False
        self._session = f"{time.strftime('%Y_%m_%d_%H_%M_%S')}_{os.getpid()}_{next(_numbers)}"
        self._watch = watching.Watch(self._at_step)

    def __enter__(self) -> Recording:
        if self.wanted is None or self.wanted.start == 0:
            self._start()
        try:
            self._watch.__enter__()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        with _unless_failed(error):
            try:
                if self.active:
                    self._stop()
            finally:
                self._watch.__exit__(None, None, None)

    def _at_step(self) -> None:
        self.steps += 1
        if self.wanted is None:
            return
        if self.steps == self.wanted.start:
            self._start()
        elif self.steps == self.wanted.stop and self.active:
            self._stop()

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = int(self.python)
        for name, value in (("raise_error_on_start_failure", True), ("session_id", self._session)):
            if hasattr(options, name):
                setattr(options, name, value)
        watching.finish()  # earlier work is not part of it
        try:
            jax.profiler.start_trace(str(self.folder), profiler_options=options)
        except Exception as error:
            raise RuntimeError(
                "JAX's profiler could not start, most likely because another trace is being recorded (jax.profiler.start_trace, "
                f"torch_xla.debug.profiler, a profiler server's client): stop that first. It said: {error}"
            ) from error
        self.active = self.recorded = True
        self._watch.begin()

    def _stop(self) -> None:
        try:
            self._watch.end()
        finally:
            self.active = False
            jax.profiler.stop_trace()

    # -- the result ------------------------------------------------------------------------------------

    def result(self, failure: BaseException | None, limit: float | None) -> Profile:
        """What the trace says. failure: what the block raised."""
        notes = []
        if failure is not None:
            notes.append(f"the block raised {type(failure).__name__}, so this is what ran before")
        if self.wanted is not None and self.steps < self.wanted.stop:
            notes.append(f"steps {self.wanted.start} to {self.wanted.stop - 1} were asked for, and the block has only {self.steps}")
        if not self.recorded:
            return Profile(folder=str(self.folder), done=True, notes=(*notes, "nothing was recorded"))
        trace = self._file()
        found = summary.summarize(reading.read(trace, limit), list(self._watch.programs.values()), self.wanted.start if self.wanted else 0)
        found.folder, found.trace = str(self.folder), str(trace)
        found.perfetto = _perfetto(trace)
        found.notes = (*notes, *found.notes)
        return found

    def _file(self) -> pathlib.Path:
        """The trace that was written."""
        place = self.folder / "plugins" / "profile"
        found = sorted(place.glob(f"{glob.escape(self._session)}/*.xplane.pb")) or sorted(
            place.glob("*/*.xplane.pb"), key=lambda p: p.stat().st_mtime_ns
        )
        if not found:
            raise RuntimeError(f"JAX's profiler wrote no trace below {place}; is the disk full?")
        return found[-1]


def _perfetto(trace: pathlib.Path) -> str:
    """Write what Perfetto opens, beside the trace; its path, '' if that is impossible. (Perfetto does not take the metadata in front of the events.)"""
    name = trace.name.removesuffix(".xplane.pb")
    given, made = trace.with_name(f"{name}.trace.json.gz"), trace.with_name("perfetto_trace.json.gz")
    try:
        with gzip.open(given, "rb") as old, gzip.open(made, "wb", compresslevel=3) as new:
            new.write(_METADATA.sub(b"", old.read(4096), count=1))
            shutil.copyfileobj(old, new, 1 << 20)
    except (OSError, EOFError) as error:
        logger.warning("no file for Perfetto: %s: %s", type(error).__name__, error)
        return ""
    return str(made)
