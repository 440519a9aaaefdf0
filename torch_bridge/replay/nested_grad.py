"""Gradients inside of one node of autograd: of what a module under `torch_bridge.optimize` returned, for what it was given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from torch_bridge.recorder import autograd_engine
from torch_bridge.replay.tape import NotRepeatable


def reentrant(outs: Iterable[torch.Tensor]) -> bool:
    """Whether there is an activation checkpoint with `use_reentrant=True` behind these results: it sets `.grad` itself, and refuses `autograd.grad`."""
    return any(map(_is_reentrant, _graph(outs)))


def unreached(outs: Iterable[torch.Tensor], held: Sequence[torch.Tensor]) -> frozenset[int]:
    """Places of the leaves that need gradients and that these results do not depend on. None of them where a reentrant checkpoint hides what it reads."""
    leaves: set[int] = set()
    for node in _graph(outs):
        if _is_reentrant(node):
            return frozenset()
        leaves.add(id(getattr(node, "variable", None)))
    return frozenset(k for k, t in enumerate(held) if t.requires_grad and t.is_leaf and id(t) not in leaves)


def _is_reentrant(node: Any) -> bool:
    return issubclass(getattr(type(node), "_forward_cls", object), CheckpointFunction)


def _graph(outs: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The nodes of autograd behind these results, each once."""
    return nodes_below(torch.autograd.graph.get_gradient_edge(o).node for o in outs if o.requires_grad)


def nodes_below(roots: Iterable[Any]) -> Iterator[Any]:
    """The nodes of autograd's graph from some on (None: there is none), each once."""
    waiting = list(roots)
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [below for below, _ in node.next_functions]


def check_leaves(inputs: Iterable[torch.Tensor]) -> None:
    """Raises NotRepeatable if `.grad` of one of these, which such a checkpoint sets, would go on elsewhere."""
    if any(t.requires_grad and not t.is_leaf for t in inputs):
        raise NotRepeatable(
            "it has an activation checkpoint with use_reentrant=True inside, and holds a tensor that was computed with gradients"
        )


def gradients(
    outs: Sequence[Any],
    inputs: Sequence[Any],
    grads: Sequence[Any],
    needed: Sequence[bool],
    keep: bool,
    create: bool = False,
    theirs: Sequence[Any] = (),
) -> list[Any]:
    """The gradient of each input that needs one; None where there is none. Where there are reentrant checkpoints, inputs that need one must be leaves.

    theirs: the script's tensors, one for each input. If the pass raises (code of the script's runs in it), those of them that are leaves keep the gradients
    that were complete by then, as they would if the pass around this one had no node for all of it.
    """
    reached = [(o, g) for o, g in zip(outs, grads, strict=True) if g is not None and o.requires_grad]
    wanted = [t for t, needs in zip(inputs, needed, strict=True) if needs]
    found: Sequence[Any] = [None] * len(wanted)
    if reached and wanted:
        roots, given = zip(*reached, strict=True)
        complete: list[tuple[int, Any]] = []
        try:
            with _without(wanted, "_backward_hooks"), _thawed(wanted):  # the pass around this one calls hooks, and passes frozen leaves by
                if reentrant(roots) and not create:
                    found = _by_leaves(roots, wanted, given, keep, complete)
                else:
                    with _noting(wanted, complete):
                        found = torch.autograd.grad(roots, wanted, given, retain_graph=keep, create_graph=create, allow_unused=True)
        except Exception:
            own = [t for t, needs in zip(theirs, needed, strict=False) if needs]
            if own and autograd_engine.accumulates():
                _leave([(own[k], grad) for k, grad in complete])
            raise
    each = iter(found)
    return [next(each) if needs else None for needs in needed]


@contextlib.contextmanager
def _noting(inputs: Sequence[Any], complete: list[tuple[int, Any]]) -> Iterator[None]:
    """While the gradients of leaves are noted, with their places, in the order in which they are complete."""
    hooks = [t.register_hook(lambda grad, k=k: complete.append((k, grad))) for k, t in enumerate(inputs) if t.is_leaf]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _leave(complete: Sequence[tuple[Any, Any]]) -> None:
    """Give leaves gradients, as autograd does at the end of a pass: with their hooks, and added to what is there."""
    for t, grad in complete:
        if t.is_leaf and t.requires_grad:
            torch.autograd.backward([t], [grad])


@contextlib.contextmanager
def _thawed(leaves: Sequence[Any]) -> Iterator[None]:
    """While leaves that were frozen after the forward pass can have gradients."""
    frozen = [t for t in leaves if not t.requires_grad]
    try:
        for t in frozen:
            t.requires_grad_(True)
        yield
    finally:
        for t in frozen:
            t.requires_grad_(False)


def _by_leaves(roots: Sequence[Any], leaves: Sequence[Any], given: Sequence[Any], keep: bool, complete: list[tuple[int, Any]]) -> list[Any]:
    """What a backward pass adds to `.grad` of leaves, which then is what it was. Hooks for when it is there wait for the pass around this one.

    complete: gets what was there, with places, if the pass raises.
    """
    before = [t.grad for t in leaves]
    with _without(leaves, "_post_accumulate_grad_hooks"):
        try:
            for t in leaves:
                t.grad = None
            torch.autograd.backward(roots, given, retain_graph=keep)
            return [t.grad for t in leaves]
        except Exception:
            complete.extend((k, t.grad) for k, t in enumerate(leaves) if t.grad is not None)
            raise
        finally:
            for t, grad in zip(leaves, before, strict=True):
                t.grad = grad


@contextlib.contextmanager
def _without(leaves: Sequence[Any], kind: str) -> Iterator[None]:
    """While these leaves have no hooks of a kind."""
    hooks = [(held, dict(held)) for t in leaves if t.is_leaf and (held := getattr(t, kind))]
    try:
        for held, _ in hooks:
            held.clear()
        yield
    finally:
        for held, registered in hooks:
            held.update(registered)
