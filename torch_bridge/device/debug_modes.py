"""What the environment can switch on to find bugs and to bound memory: op by op, blocking, checks of NaNs, indices and passes, no donation, compiling only,
metrics of each step."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch

from torch_bridge import _compat
from torch_bridge.collectives import index_checks
from torch_bridge.compiler.trace import Trace
from torch_bridge.config.settings import SETTINGS
from torch_bridge.ir.segment import Results, Storage
from torch_bridge.mesh import world
from torch_bridge.runtime import executor, session
from torch_bridge.runtime.observers import Observer
from torch_bridge.runtime.session import STATE
from torch_bridge.source import NOWHERE
from torch_bridge.telemetry import metrics_file

Dispatch = Callable[..., Any]


def configure(values: dict[str, Any], dispatch: Dispatch) -> Dispatch:
    """Set up how programs run for the values of `environment.check`; returns the dispatch function to use."""
    SETTINGS.max_traces = values.get("NEURON_NUM_RECENT_MODELS_TO_KEEP", SETTINGS.max_traces)
    if values.get("NEURON_LAUNCH_BLOCKING"):
        SETTINGS.max_in_flight = 0
    SETTINGS.donate = values.get("XLA_ENABLE_PARAM_ALIASING", True)
    SETTINGS.extract_only = bool(values.get("NEURON_EXTRACT_GRAPHS_ONLY"))
    if values.get("NEURON_FAIL_ON_NAN") or values.get("NEURON_RT_NUMERICAL_ERRORS_VERBOSITY") == "critical":
        session.check_with(NAN_CHECK)
    if values.get("NXD_JAX_CHECK_INDICES") or values.get("NEURON_USE_EAGER_DEBUG_MODE"):
        index_checks.install()
    if values.get("XLA_METRICS_FILE"):
        session.check_with(StepMetrics(values["XLA_METRICS_FILE"]))
    SETTINGS.cold_shapes = values.get("NXD_JAX_COLD_SHAPES", True)
    SETTINGS.torch_kernels = values.get("NXD_JAX_TORCH_KERNELS", True)
    SETTINGS.speculate = values.get("NXD_JAX_SPECULATE", SETTINGS.speculate)
    SETTINGS.verify = bool(values.get("NXD_JAX_VERIFY"))
    return op_by_op(dispatch) if values.get("NEURON_USE_EAGER_DEBUG_MODE") else dispatch


class _Depth(threading.local):
    """Whether this thread is inside an op already (some are made of others)."""

    inside = False


_DEPTH = _Depth()


def op_by_op(dispatch: Dispatch) -> Dispatch:
    """A dispatch function that runs each op by itself and waits for it."""

    def run(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if _DEPTH.inside:
            return dispatch(func, args, kwargs)
        _DEPTH.inside = True
        try:
            out = dispatch(func, args, kwargs)
        finally:
            _DEPTH.inside = False
        if not STATE.session.current.capture:
            executor.sync(wait=True)
        return out

    return run


class StepMetrics(Observer):
    """Appends the report of metrics to a file after each step, in the first process of a machine."""

    def __init__(self, file: str):
        self.file = file

    def step_ended(self, ran: bool) -> None:
        if world.first_of_machine():
            metrics_file.append(self.file)


class NanCheck(Observer):
    """FloatingPointError if a result of an execution holds a NaN; it names the one that was recorded first. The tensors keep their values."""

    reads_values = True

    def executed(self, trace: Trace, live: Results) -> None:
        found: dict[int, Any] = {}
        with _compat.enable_x64():
            for vid in sorted(live):
                array = live[vid][0].array
                if array is not None and jnp.issubdtype(array.dtype, jnp.inexact):
                    found[vid] = jnp.isnan(array).any()
        bad = [vid for vid, flag in found.items() if bool(flag)]
        if bad:
            raise FloatingPointError(_explain(trace, live, bad, len(live)))


NAN_CHECK = NanCheck()
"""Of this process."""


def _explain(trace: Trace, live: Results, bad: list[int], count: int) -> str:
    first = bad[0]
    entry, source = _producer(trace, first)
    layout = live[first][0].layout
    owner = next((name for s in live[first] if (name := _owner(s))), "")
    return (
        f"NaN in {len(bad)} of {count} results of an execution. The first is {owner}{str(layout.dtype).removeprefix('torch.')}{list(layout.size)}, "
        f"from {entry.op} at {source}. Look for log, sqrt or a division of numbers that may be 0, a learning rate that is too high, or values too large "
        "for 16 bits; NEURON_USE_EAGER_DEBUG_MODE=1 finds the op that made it. (Checked because of NEURON_FAIL_ON_NAN or "
        "NEURON_RT_NUMERICAL_ERRORS_VERBOSITY=critical.)"
    )


def _producer(trace: Trace, vid: int) -> tuple[Any, Any]:
    """The entry of the node that gives a value, and where it was called."""
    first = 0
    for i, node in enumerate(trace.nodes):
        first += node[0].n_outs
        if vid < first:
            return node[0], trace.sources[i] if i < len(trace.sources) else NOWHERE
    raise AssertionError(f"no node gives value {vid}")


def _owner(storage: Storage) -> str:
    """'parameter 0.weight, ' for the storage of a parameter, likewise for its gradient; else ''. Looks at every module there is."""
    found = ""
    for module in gc.get_objects():
        if issubclass(type(module), torch.nn.Module):
            for name, p in module.named_parameters():
                for what, t in (("parameter", p), ("gradient of parameter", p.grad)):
                    if getattr(t, "_storage", None) is storage:
                        found = max(found, f"{what} {name}, ", key=len)  # the whole path, from the outermost module
    return found
