"""`torch_xla.debug.profiler`, known as `xp`: JAX's profiler. Traces open in TensorBoard (xprof) or Perfetto."""

from __future__ import annotations

import atexit
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

from torch_bridge.mesh import world
from torch_bridge.runtime import steps

_marked_by_trace = threading.local()
_server_port: int | None = None


def set_tracer_marked_step(value: bool) -> None:
    """`xp.set_tracer_marked_step`: tell the loader that a `StepTrace` has just ended the step."""
    _marked_by_trace.value = value


def get_tracer_marked_step() -> bool:
    """`xp.get_tracer_marked_step`."""
    return getattr(_marked_by_trace, "value", False)


def start_server(port: int, only_on_master: bool = True) -> object | None:
    """`xp.start_server`: let tools capture traces of this process at `localhost:port`; only on rank 0 if `only_on_master`.

    Keep the result alive.
    """
    global _server_port
    if only_on_master and world.rank() != 0:
        return None
    import jax

    server = jax.profiler.start_server(port)
    _server_port = port
    return server


def start_trace(log_dir: str | os.PathLike[str]) -> None:
    """`xp.start_trace`: trace into this folder until `stop_trace`."""
    import jax

    jax.profiler.start_trace(os.fspath(log_dir))


def stop_trace() -> None:
    """`xp.stop_trace`: write the trace."""
    import jax

    jax.profiler.stop_trace()


def trace(
    service_addr: str,
    logdir: str,
    duration_ms: int = 1000,
    num_tracing_attempts: int = 3,
    host_tracer_level: int = 2,
    device_tracer_level: int = 1,
    delay_ms: int = 0,
    timeout_s: int = 120,
    interval_s: int = 5,
) -> None:
    """`xp.trace`: trace this process for `duration_ms`, from another thread than the one that trains.

    `service_addr` must name this process's own server. A script that ends before that ends the trace, and waits until it is written.
    """
    _capture(service_addr, logdir, duration_ms, delay_ms).run()


class _Capture:
    """A trace for some time. The interpreter's end waits for it: it aborts the process where a thread is still in the profiler."""

    def __init__(self, logdir: str, seconds: float, delay: float):
        import jax.profiler  # noqa: F401  (its own exit handlers are to run after ours)

        self.logdir = logdir
        self.seconds = seconds
        self.delay = delay
        self.process = os.getpid()
        self.over = threading.Event()
        self.written = threading.Event()
        atexit.register(self.finish)

    def run(self) -> None:
        """Trace, and write the trace."""
        try:
            if self.over.wait(self.delay):
                return
            start_trace(self.logdir)
            self.over.wait(self.seconds)
            stop_trace()
        finally:
            self.written.set()
            atexit.unregister(self.finish)

    def finish(self) -> None:
        """End the trace now, and wait until it is written."""
        if os.getpid() == self.process:  # a forked process has no such thread
            self.over.set()
            self.written.wait()


def _capture(service_addr: str, logdir: str, duration_ms: int, delay_ms: int) -> _Capture:
    host, _, port = service_addr.rpartition(":")
    if host.removeprefix("grpc://") not in ("localhost", "127.0.0.1", "") or port != str(_server_port):
        raise NotImplementedError(
            f"xp.trace({service_addr!r}): only this process's own server can be traced from Python (start_server was called with port "
            f"{_server_port}). "
            f"From another process run: python -m jax.collect_profile --log_dir {logdir} {port or '<port>'} {duration_ms}"
        )
    return _Capture(logdir, duration_ms / 1000, delay_ms / 1000)


def trace_detached(
    service_addr: str,
    logdir: str,
    duration_ms: int = 1000,
    num_tracing_attempts: int = 3,
    host_tracer_level: int = 2,
    device_tracer_level: int = 1,
    delay_ms: int = 0,
    timeout_s: int = 120,
    interval_s: int = 5,
) -> threading.Thread:
    """`xp.trace_detached`: `trace` on a thread, which is returned. Raises what `trace` raises about `service_addr`."""
    capture = _capture(service_addr, logdir, duration_ms, delay_ms)
    thread = threading.Thread(target=capture.run, name="xla-trace", daemon=True)
    thread.start()
    return thread


class Trace:
    """`xp.Trace`: a named stretch of host time in the trace, as a context manager."""

    def __init__(self, name: str, **kwargs: Any):
        self.name = name
        self.kwargs = kwargs

    def __enter__(self) -> Any:
        self._annotation = self._make()
        self._annotation.__enter__()
        return self

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        self._annotation.__exit__(type, value, traceback)

    def _make(self) -> Any:
        import jax

        return jax.profiler.TraceAnnotation(self.name, **self.kwargs)


class StepTrace(Trace):
    """`xp.StepTrace`: a training step in the trace (`step_num=`). Ends the step, so that the loader need not."""

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        if type is None:
            steps.mark()
            set_tracer_marked_step(True)
        super().__exit__(type, value, traceback)

    def _make(self) -> Any:
        import jax

        return jax.profiler.StepTraceAnnotation(self.name, **self.kwargs)


def trace_me(scope: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`xp.trace_me`: a decorator that gives a function's calls a name in the trace."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with Trace(scope):
                return fn(*args, **kwargs)

        return traced

    return decorate
