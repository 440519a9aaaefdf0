"""Saving in the background: one thread, one save after the other, nothing lost at exit."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from torch_bridge.mesh import exits
from torch_bridge.runtime import interrupts

logger = logging.getLogger("nxd_jax")

Task = Callable[[], Any]


class Worker:
    """A thread that runs tasks in order. What a task raises is raised by the next `wait()`; without one, the process ends with an error."""

    def __init__(self) -> None:
        self._tasks: queue.Queue[tuple[Task, float]] = queue.Queue()
        self._awaited = threading.Event()
        self._thread: threading.Thread | None = None
        self._errors: list[BaseException] = []

    def submit(self, task: Task, pause: float = 0.0) -> None:
        """Have a task run after those before it, and `pause` seconds later, so that training has the processors for its next step; at once if awaited."""
        with interrupts.deferred():  # a task that is put is one that runs: `wait` waits for it
            self._tasks.put((task, pause))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nxd_jax-checkpoints", daemon=True)
                self._thread.start()
                # Before any thread pool is closed: writing needs some. (atexit would be too late.)
                threading._register_atexit(self._end)  # type: ignore[attr-defined]

    def wait(self) -> None:
        """Until all tasks are done. Raises the first error of those that failed since the last call."""
        self._finish()
        self._awaited.clear()
        if self._errors:
            first, self._errors = self._errors[0], []
            raise first

    @property
    def busy(self) -> bool:
        """Whether tasks are left."""
        return self._tasks.unfinished_tasks > 0

    def _run(self) -> None:
        while True:
            task, pause = self._tasks.get()
            try:
                self._awaited.wait(pause)
                task()
            except BaseException as error:
                self._errors.append(error)
                logger.error("a checkpoint could not be saved: %s", error)
            finally:
                del task  # it holds the arrays
                self._tasks.task_done()

    def _finish(self) -> None:
        self._awaited.set()
        self._tasks.join()

    def _end(self) -> None:
        """At the end of the process, which nobody can catch an error from any more."""
        self._finish()
        if self._errors:
            words = f"a save in the background failed: {type(self._errors[0]).__name__}: {self._errors[0]}"
            exits.fail(words)
            logger.error("the process ends with status %s, %s", exits.FAILED, words)
