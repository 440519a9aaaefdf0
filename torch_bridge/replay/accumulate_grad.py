"""Gradients of parameters that go straight into `.grad`, for modules under `torch_bridge.optimize`.

At the end of a backward pass autograd has a node for each leaf, which detaches the gradient: an op that goes through torch's dispatcher into Python, and for a
model with many weights much of a played step's time. Where that node would do nothing else, its work is done here, and it gets nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.function import _HookMixin

from torch_bridge.identity import all_are
from torch_bridge.recorder import autograd_engine, op_rules
from torch_bridge.recorder.tensor import XLATensor

_dicts: dict[int, weakref.ref[Any]] = {}
"""Where torch keeps the hooks of autograd's nodes, for as long as they live."""
_register = _HookMixin._register_hook


def _watched(hooks: Any, hook: Any) -> Any:
    """torch's own, called for every hook on a node; the dict it returns belongs to the node."""
    found = _register(hooks, hook)
    ref = weakref.ref(found[0], _forget)
    _dicts[id(ref)] = ref
    return found


def _forget(ref: weakref.ref[Any]) -> None:
    _dicts.pop(id(ref), None)


_HookMixin._register_hook = staticmethod(_watched)  # type: ignore[method-assign]


def possible() -> bool:
    """Whether the backward pass that runs now adds to the `.grad` of all leaves (it is no `autograd.grad`, has no `inputs=` and no `create_graph=`), and nobody
    looks at single nodes."""
    return autograd_engine.accumulates() and unwatched()


def unwatched() -> bool:
    """Whether nobody looks at single nodes of autograd (hooks on nodes, anomaly detection, a profiler)."""
    return not (torch.is_anomaly_enabled() or torch.autograd._profiler_enabled() or any(ref() for ref in list(_dicts.values())))


def empty(leaves: Sequence[Any], views: Sequence[Any]) -> bool:
    """Whether these are leaves without gradients and hooks that lie as told (None: as they like), so that `.grad` can just be set. None is frozen."""
    return (
        all(map(_IS_LEAF, leaves))
        and all(map(_REQUIRES_GRAD, leaves))
        and all_are(map(_GRAD, leaves), None)
        and not any(map(_HOOKS, leaves))
        and not any(map(_POST_HOOKS, leaves))
        and all(view is None or p._layout is view for p, view in zip(leaves, views, strict=True))
    )


_IS_LEAF, _REQUIRES_GRAD, _GRAD, _HOOKS, _POST_HOOKS = map(
    attrgetter, ("is_leaf", "requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks")
)


def hand_over(leaves: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """Make each gradient, which nobody else holds, that of its leaf, or add it to the one there is. What autograd has to do comes back, with None in the places
    of others: where the leaf or its gradient lies otherwise, the leaf is frozen by now, or there are hooks."""
    rest: list[Any] = list(grads)
    old: list[Any] = []
    new: list[Any] = []
    memory: set[Any] = set()
    for k, (p, g) in enumerate(zip(leaves, grads, strict=True)):
        if g is None or not p.requires_grad or not _is_plain(p, g):
            continue
        before = p.grad
        if before is None:
            p.grad, rest[k] = g, None
        elif type(before) is XLATensor and not before.requires_grad and before._storage not in memory and op_rules.adds_whole(before, g):
            memory.add(before._storage)
            old.append(before)
            new.append(g)
            rest[k] = None
    op_rules.add_all(old, new)
    return rest


def _is_plain(p: Any, g: Any) -> bool:
    """Whether a leaf lies as its new gradient does, and has no hooks."""
    return p.is_leaf and p._layout is g._layout and not p._backward_hooks and not p._post_accumulate_grad_hooks


def add(leaves: Sequence[Any], grads: Sequence[Any]) -> bool:
    """`hand_over`, if all of it can be done: no hooks, no tensors that share memory; else False, and nothing is done.

    grads: on xla, and held by nobody else.
    """
    before = [p.grad for p in leaves]
    memory = {id(t._storage) for t in (*grads, *before) if t is not None}
    plain = all(map(_is_plain, leaves, grads))
    alike = all(old is None or old.dtype == g.dtype for old, g in zip(before, grads, strict=True))
    if not (plain and alike and unwatched()) or len(memory) < len(grads) + sum(old is not None for old in before):
        return False
    with torch.no_grad():
        for p, g in zip(leaves, hand_over(leaves, grads), strict=True):
            if g is not None and p.grad is None:  # frozen since its gradient was computed
                p.grad = g
            elif g is not None:
                p.grad.add_(g)
    return True
