"""`torch_xla.torch_xla`: the functions that torch_xla has at its top level."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import torch
from torch.types import Device

from torch_bridge import metrics
from torch_bridge.config import environment
from torch_bridge.recorder import eager_mode
from torch_bridge.runtime import steps
from torch_bridge.torch_xla import runtime
from torch_bridge.torch_xla.core import xla_model

F = TypeVar("F", bound=Callable[..., Any])


def device(index: int | None = None) -> torch.device:
    """`torch_xla.device`: this worker's device, `xla:0`. Raises ValueError for an index that does not exist."""
    environment.prepare()
    return runtime.device_at(index)


def devices() -> list[torch.device]:
    """`torch_xla.devices`: the xla devices of this process."""
    return [torch.device(name) for name in xla_model.get_xla_supported_devices()]


def real_devices() -> list[str]:
    """`torch_xla.real_devices`: what they stand for, such as `NEURON:0`."""
    return xla_model.xla_real_devices()


def device_count() -> int:
    """`torch_xla.device_count`: xla devices of this process."""
    return len(real_devices())


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    """`torch_xla.sync`: end the step. Compiles and runs everything recorded, then calls the step closures; `wait` blocks until the device
    is done. `reset_scope`, which is about torch_xla's names of ops, is accepted.
    """
    steps.mark(wait=wait)


def step() -> contextlib.AbstractContextManager[None]:
    """`torch_xla.step`: a `with` block (or decorator) that is one step: what was recorded before and what it records run separately."""
    return compile()


@overload
def compile(
    f: None = None,
    full_graph: bool | None = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
    *,
    num_different_graphs_allowed: int | None = None,
) -> _Region: ...
@overload
def compile(
    f: F,
    full_graph: bool | None = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
    *,
    num_different_graphs_allowed: int | None = None,
) -> F: ...


def compile(
    f: Any = None,
    full_graph: bool | None = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
    *,
    num_different_graphs_allowed: int | None = None,
) -> Any:
    """`torch_xla.compile`: run `f` (a function or module) as one graph. Also a decorator, with or without arguments, and a context manager.

    full_graph: raise RuntimeError if `f` makes the graph run before its end (by `.item()`, printing, ...). max_different_graphs (older
    releases: num_different_graphs_allowed): raise RuntimeError once calls of `f` have given more different graphs than this. name: what
    errors call it; the function's name by default.
    """
    region = _Region(
        name or getattr(f, "__name__", None) or (type(f).__name__ if f is not None else "with torch_xla.compile()"),
        bool(full_graph),
        num_different_graphs_allowed if max_different_graphs is None else max_different_graphs,
    )
    return region if f is None else region(f)


class _Region(contextlib.AbstractContextManager[None]):
    """What `torch_xla.compile` gives: a step of its own, as a context manager and as a decorator."""

    def __init__(self, name: str, full_graph: bool, allowed: int | None):
        self.name = name
        self.full_graph = full_graph
        self.allowed = allowed
        self.graphs: set[int] = set()
        self._open: list[contextlib.AbstractContextManager[None]] = []

    def __call__(self, f: F) -> F:
        if self.name == "with torch_xla.compile()":
            self.name = getattr(f, "__name__", type(f).__name__)

        @functools.wraps(f)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            with self._region():
                return f(*args, **kwargs)

        return compiled  # type: ignore[return-value]

    def __enter__(self) -> None:
        region = self._region()
        self._open.append(region)
        region.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)

    @contextlib.contextmanager
    def _region(self) -> Iterator[None]:
        from torch_bridge.runtime import session

        sync()
        before = metrics.EXECUTE_TIME.count
        try:
            with eager_mode.mode(False):
                yield
        except BaseException:
            sync()
            raise
        early = metrics.EXECUTE_TIME.count - before
        culprit = session.current().recent[-1] if early else None
        sync()
        if self.full_graph and culprit is not None:
            raise RuntimeError(
                f"Unexpected execution happens inside the compiled function {self.name!r}: with full_graph=True it must be one graph, "
                f"but it was run {early} "
                f"time(s) before its end. The last value that Python asked for was computed at {_last_line(culprit)}. "
                "Keep .item(), .cpu(), print and `if tensor:` out of it, or call torch_xla.compile without full_graph=True."
            )
        if self.allowed is not None and metrics.EXECUTE_TIME.count > before:
            self.graphs.add(id(session.current().recent[-1].graph))
            if len(self.graphs) > self.allowed:
                raise RuntimeError(
                    f"{self.name!r} has given {len(self.graphs)} different graphs, but max_different_graphs={self.allowed}. "
                    "Inputs of other shapes "
                    "or Python branches make new graphs, each compiled anew: pad inputs to fixed shapes, or allow more."
                )


def _last_line(program: Any) -> str:
    sources = [n.meta["source"] for n in program.graph.nodes if "source" in n.meta]
    return str(sources[-1]) if sources else "an unknown line"


def manual_seed(seed: int, device: Device = None) -> None:
    """`torch_xla.manual_seed`: seed the device's random numbers."""
    xla_model.set_rng_state(seed, device)


def launch(fn: Callable[..., Any], args: tuple[Any, ...] = (), start_method: str = "spawn", debug_single_process: bool = False) -> None:
    """`torch_xla.launch`: call `fn(index, *args)` on every worker; under torchrun this process is one worker."""
    if torch.distributed.is_torchelastic_launched():
        fn(int(os.environ["LOCAL_RANK"]), *args)
        return
    from torch_bridge.torch_xla.distributed import xla_multiprocessing

    xla_multiprocessing.spawn(fn, args, nprocs=1 if debug_single_process else None, start_method=start_method)
