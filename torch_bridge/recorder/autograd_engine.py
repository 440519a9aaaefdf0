"""Backward passes over xla tensors: on the thread that asked for them, and with their errors raised at its end.

torch's autograd engine, unwinding from a Python exception that an op of the backward pass raised, asks the device guard for its type; for a
backend written in Python that ends the process (`std::terminate`), as Python must not be asked anything while an exception is set. So inside a
backward pass an op that fails records nothing more: the error waits in `_State`, the engine finishes on undefined gradients, and the caller gets
the error. Ctrl-C waits likewise. torch's own thread per device would keep both from the script, so the pass runs on the calling thread; nothing is
lost, recording holds Python's lock anyway. It also lets a process that ran a backward pass before it imported us go on (torch counts devices, to
make their threads, only once). Until the first xla tensor is made, backward passes take torch's own path.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.graph as _graph

from torch_bridge import errors
from torch_bridge.runtime import backend, interrupts

_original = _graph._engine_run_backward


class _State(threading.local):
    """Of this thread: how many backward passes are running inside each other, and the first error of theirs. accumulates: the innermost adds to the `.grad` of
    all leaves."""

    depth = 0
    accumulates = False
    error: BaseException | None = None
    signals: interrupts.Deferred | None = None


_STATE = _State()


def guarded(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """A dispatch function that keeps its errors for the end of the backward pass it runs in."""

    def run(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        state = _STATE
        if not state.depth:
            return dispatch(func, args, kwargs)
        if state.error is None and state.signals is not None and state.signals.caught:
            state.error = KeyboardInterrupt()
        if state.error is not None:
            return _undefined(func)
        try:
            return dispatch(func, args, kwargs)
        except BaseException as error:
            state.error = error
            return _undefined(func)

    return run


_DEVICE_TYPE = torch._C._autograd.DeviceType.PrivateUse1
GUARD_TYPE = staticmethod(functools.partial(next, itertools.repeat(_DEVICE_TYPE)))
"""The device guard's type, as a function without Python code in it: torch calls it where a KeyboardInterrupt, which Python raises on
entering a function of its own, would end the process."""


def _rescue(guard: object) -> Any:
    """The device guard's type while a backward pass runs (and Ctrl-C waits): first take over an exception that is on its way through the
    engine (from a hook, say).

    The engine then finds none, returns without one, and `_engine_run_backward` raises what was kept.
    """
    try:
        _PROBE()
    except BaseException as error:
        if _STATE.error is None:
            _STATE.error = error
    return _DEVICE_TYPE


_PROBE = ctypes.pythonapi.PyErr_Occurred
"""A C function: calling it raises the exception that is set, if there is one."""


def _undefined(func: torch._ops.OpOverload) -> Any:
    """What an op returns when it has no result: undefined tensors."""
    n = len(func._schema.returns)
    return None if n < 2 else (None,) * n


def _engine_run_backward(t_outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    if not backend.started:  # no xla tensor has been made yet; a loss on the CPU may come from one
        return _original(t_outputs, *args, **kwargs)
    state = _STATE
    if not state.depth and _without_engine(t_outputs, *args, **kwargs):
        return ()
    with torch.autograd.set_multithreading_enabled(False), interrupts.deferred() as signals:
        outer, outer_accumulates = state.signals, state.accumulates
        _watch(1)
        state.depth += 1
        state.signals = signals or outer
        state.accumulates = bool(kwargs.get("accumulate_grad")) and len(args) == 4 and not args[2] and not args[3]  # create_graph, inputs
        try:
            result = _original(t_outputs, *args, **kwargs)
        except Exception as error:
            raise _take_error(state) or errors.explain_derivative(error) from None
        finally:
            state.depth -= 1
            state.signals, state.accumulates = outer, outer_accumulates
            _watch(-1)
        kept = _take_error(state)
    if kept is not None:
        raise kept
    return result


WITHOUT_ENGINE: Callable[[Any, Any], bool] | None = None
"""Given a loss and its gradient, does the backward pass if autograd's engine is not needed for it (`module_calls`)."""


def _without_engine(
    outputs: Sequence[Any], grads: Any = (), keep: Any = True, create: Any = True, inputs: Any = True, *rest: Any, **kwargs: Any
) -> bool:
    """Whether a backward pass has been done without it: one from one loss, that is to fill the `.grad` of all leaves and to free its graph."""
    if WITHOUT_ENGINE is None or not kwargs.get("accumulate_grad") or keep or create or inputs or rest:
        return False
    if len(outputs) != 1 or len(grads) != 1 or not isinstance(outputs[0], torch.Tensor):  # or a `GradientEdge`
        return False
    return grads[0] is not None and WITHOUT_ENGINE(outputs[0], grads[0])


def accumulates() -> bool:
    """Whether this thread is in a backward pass that adds to the `.grad` of every leaf, without a graph of its own."""
    return _STATE.accumulates and _STATE.error is None


_running = 0
_running_lock = threading.Lock()
_guard: Any = None


def _watch(change: int) -> None:
    """Count the backward passes of all threads; the guard looks for exceptions while there are any."""
    global _running
    with _running_lock:
        _running += change
        _guard.type_ = _rescue if _running else GUARD_TYPE


def _take_error(state: _State) -> BaseException | None:
    error, state.error = state.error, None
    return error


def install(guard: type) -> None:
    """Put it in place (once); `guard` is the class of torch's device guard, whose `type_` is ours."""
    global _guard
    _guard = guard
    if _graph._engine_run_backward is _original:
        _graph._engine_run_backward = _engine_run_backward
        torch.autograd._engine_run_backward = _engine_run_backward


def adds_up(hook: Any) -> Any:
    """Mark a hook for `register_post_accumulate_grad_hook` that does nothing but add `.grad` to `.main_grad` and forget it, what it records but for the first
    time in a step being the same each time."""
    hook.adds_up = True
    return hook


def only_adds_up(p: torch.Tensor) -> bool:
    """Whether what is told of a parameter's complete gradients, if anything, is hooks that add them up alone."""
    hooks: Any = p._post_accumulate_grad_hooks
    return not hooks or all(getattr(hook, "adds_up", False) for hook in hooks.values())
