"""Calls of modules: torch's own `__call__`, with hooks on the forward pass."""

from __future__ import annotations

import types
from typing import Any

import torch

from torch_bridge import source
from torch_bridge.guards import allowed_hooks, probes
from torch_bridge.guards.observer import Args, Kwargs, Observer
from torch_bridge.guards.unfollowed import opaque
from torch_bridge.guards.values import is_a

MODULE_CALL = tuple(
    f if f.__code__.co_filename == torch.nn.modules.module.__file__ else None
    for f in (torch.nn.Module.__call__, torch.nn.Module._call_impl)
)
"""torch's own, if nobody has put something in their places."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def follow_module(observer: Observer, m: torch.nn.Module, args: Args, kwargs: Kwargs) -> Any:
    """`module(...)`: torch's own call, or that of its class."""
    how = observer.lookup(type(m), "__call__")
    if is_a(how, types.FunctionType) and how is not MODULE_CALL[0]:
        return observer.caller(observer, how, (m, *args), kwargs)
    return follow_call_of_module(observer, m, args, kwargs) if how is MODULE_CALL[0] else opaque(observer, m, args, kwargs)


def follow_call_of_module(observer: Observer, m: torch.nn.Module, args: Args, kwargs: Kwargs) -> Any:
    """`nn.Module.__call__(module, ...)`, which a class's own may call: its hooks, and its forward."""
    if observer.lookup(type(m), "_call_impl") is not MODULE_CALL[1] or m._compiled_call_impl is not None:
        return opaque(observer, m, args, kwargs)
    observer.conditions.object(m)
    hooks = {kind: observer.entry(m, vars(m), kind, kind) for kind in _HOOKS}
    if any(hooks.values()):
        return _with_hooks(observer, m, hooks, args, kwargs)
    for kind, held in hooks.items():
        observer.conditions.elements(held, f"{type(m).__name__}.{kind}")
    return module_frame(m, args, kwargs)


def module_frame(self: torch.nn.Module, args: Args, kwargs: Kwargs) -> Any:
    """In the place of `nn.Module._call_impl` on the stack: `source` knows it, and says in which module an op was called."""
    return probes.call(probes.attribute(self, "forward"), *args, **kwargs)


source.add_module_frame(module_frame.__code__)


def _with_hooks(observer: Observer, m: torch.nn.Module, hooks: dict[str, Any], args: Args, kwargs: Kwargs) -> Any:
    """Forward hooks are code like any other."""
    if hooks["_backward_hooks"] or hooks["_backward_pre_hooks"] or m._forward_hooks_with_kwargs or m._forward_pre_hooks_with_kwargs:
        return opaque(observer, m, args, kwargs, "it has hooks on its backward pass, or hooks with keyword arguments")
    for kind, held in hooks.items():
        observer.conditions.elements(held, f"{type(m).__name__}.{kind}")
    for hook in list(hooks["_forward_pre_hooks"].values()):
        found = probes.call(hook, m, args)
        if found is not None:
            args = found if is_a(found, tuple) else (found,)
    out = module_frame(m, args, kwargs)
    for hook in list(hooks["_forward_hooks"].values()):
        if allowed_hooks.idle(hook) and not observer.wrote(allowed_hooks.collector(), None):
            continue  # nobody collects around the module (`torch_state.observed`), and nobody inside
        found = probes.call(hook, m, args, out)
        out = out if found is None else found
    return out
