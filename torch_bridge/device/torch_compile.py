"""`torch.compile` for xla: `backend="openxla"` plays modules from recordings, other backends leave xla tensors to the recorder.

torch's own tracer reads bytecode and wants plain tensors. Here every op is recorded anyway, and what `torch.compile` is asked for, not to run a module's Python
in every step, is what `torch_bridge.optimize` does: for openxla the module is optimized, with its checks and its warnings, and nothing is traced.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_bridge.device import control_flow

OURS = ("openxla", "openxla_eval")
"""The names that torch_xla registers with torch."""
NOT_TRACED = ("torch_bridge", "nxd_jax", "torch_xla", "neuronx_distributed", "torch_neuronx", "libneuronxla")
"""Packages whose functions torch's tracer does not look into: they record."""

_original: Any = None


def install() -> None:
    """Put the `torch.compile` that knows openxla in the place of torch's (once). It imports nothing until it is called."""
    global _original
    if _original is None:
        _original = torch.compile
        torch.compile = functools.wraps(_original)(_compile)


def _compile(model: object = None, **options: Any) -> Any:
    """`torch.compile`, with a backend for xla.

    With `backend="openxla"` a module is played from recordings (`torch_bridge.optimize`) and comes back in torch's `OptimizedModule`, its own as `_orig_mod`; a
    function comes back as one whose modules are played: those among its arguments, those that it holds or is a method beside, and globals that it names.
    `fullgraph`, `dynamic`, `mode` and `options` decide nothing: a module that cannot be played goes on op by op, with a warning that says why. With another
    backend torch traces as usual, and what is on xla is recorded op by op in between. TypeError for openxla with something that cannot be called.
    """
    if model is None:
        return lambda model: _compile(model, **options)
    if not _is_ours(options.get("backend")) or options.get("disable", False) or torch.compiler.is_exporting():
        run = control_flow.run_on_xla(model, lambda: _elsewhere(model, options))
        return _elsewhere(model, options) if run is None else run
    if isinstance(model, torch.nn.Module):
        return torch.compiler.disable(_optimized(model), recursive=True)
    if not callable(model):
        raise TypeError(f'torch.compile(backend="openxla") takes a module or a function, got {type(model).__name__}')
    return _with_modules_played(model)


def _is_ours(backend: object) -> bool:
    """Whether a backend is openxla, or `dynamo_backend2.dynamo_backend`."""
    return backend in OURS or getattr(backend, "plays", False) is True


def _elsewhere(model: Any, options: dict[str, Any]) -> Any:
    """torch's own, told what not to trace."""
    from torch._dynamo import trace_rules

    for package in NOT_TRACED:
        if package in sys.modules:
            trace_rules.add(package)
    return _original(model, **options)


def _with_modules_played(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; before each call, modules that it will find on xla are optimized."""

    @functools.wraps(function)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        from torch_bridge.replay import replay_policy

        for module in _modules(function, args, kwargs):
            if replay_policy.on_xla(module):
                _optimized(module)
        return function(*args, **kwargs)

    compiled._torchdynamo_orig_callable = function  # type: ignore[attr-defined]
    return compiled


def _optimized(module: torch.nn.Module) -> torch.nn.Module:
    from torch_bridge.replay import player

    forward: Any = player.optimize(module).forward
    forward.compiled = True
    return module


def _modules(function: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[torch.nn.Module]:
    """The modules that a function is given, and those that it holds, names or is a method of or beside."""
    inner = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        args, kwargs, inner = (*inner.args, *args), {**inner.keywords, **kwargs}, inspect.unwrap(inner.func)
    owner = getattr(inner, "__self__", None)
    inner = getattr(inner, "__func__", inner)
    code = getattr(inner, "__code__", None)
    named = [inner.__globals__.get(name) for name in code.co_names] if code is not None else []
    held = [cell.cell_contents for cell in getattr(inner, "__closure__", None) or () if _filled(cell)]
    beside = [] if isinstance(owner, torch.nn.Module) else list(getattr(owner, "__dict__", {}).values())
    for found in (*args, *kwargs.values(), owner, *beside, *held, *named):
        if isinstance(found, torch.nn.Module):
            yield found


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return False
