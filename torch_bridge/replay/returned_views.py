"""Tensors that a module returns and that are views of the same elements, such as logits and their transpose, or hidden states and those of the first token.

autograd must know that they are: a write into one of them changes the gradients of the others. So the node that stands for the module gives the tensor that
they are views of, and the views are made of that outside, by ops that autograd follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torch_bridge.ir.layout import Layout, Step, meta_of, of_meta, read_steps
from torch_bridge.replay.side_effects import shares_memory

aten = torch.ops.aten


class View(NamedTuple):
    """A tensor that a module returns. of: its number among the results of the module's node, or of what it is a view of; steps: from that to it."""

    of: int
    steps: tuple[Step, ...] = ()


class Arranged(NamedTuple):
    """given: the results of the node; views: what the module returns, made of them; None where that is the same."""

    given: list[Any]
    views: tuple[View, ...] | None


def arranged(outs: Sequence[Any]) -> Arranged:
    """What a module returned, with views of the same elements in the form of what they are views of. Others, and what autograd cannot be told, stay."""
    groups: dict[int, list[Any]] = {}
    for t in outs:
        groups.setdefault(id(t._storage), []).append(t)
    steps: dict[int, tuple[Any, tuple[Step, ...]]] = {}
    for group in groups.values():
        if len(group) > 1 and any(t.requires_grad for t in group) and shares_memory(t._layout for t in group):
            steps.update(_of_one(group) or {})
    if not steps:
        return Arranged(list(outs), None)
    given: list[Any] = []
    places: dict[int, int] = {}
    views: list[View] = []
    for t in outs:
        of, how = steps.get(id(t), (t, ()))
        if id(of) not in places:
            places[id(of)] = len(given)
            given.append(of)
        views.append(View(places[id(of)], how))
    return Arranged(given, tuple(views))


def _of_one(group: Sequence[Any]) -> dict[int, tuple[Any, tuple[Step, ...]]] | None:
    """For each of these tensors on one storage, by id: what all of them are views of, as autograd has it, and how. None if there is no such tensor."""
    root = _root(group[0])
    if not all(t.requires_grad and _root(t) is root for t in (root, *group)):
        return None
    found = {}
    for t in group:
        how = _steps(root._layout, t._layout)
        if how is None:
            return None
        found[id(t)] = root, how
    return found


def _root(t: Any) -> Any:
    return t._base if t._is_view() else t


def _steps(root: Layout, view: Layout) -> tuple[Step, ...] | None:
    """From a tensor that is all of its storage to a view of it, by ops that give views; None if there are none."""
    if view is root:
        return ()
    if not root.dense or not root.numel or root.dtype != view.dtype or view.conj or view.neg:
        return None
    how = tuple((aten.view.default if op is aten.reshape.default else op, args) for op, args in read_steps(root, view))
    try:
        made = of_meta(_through(meta_of(root), how))
    except RuntimeError:  # a shape that no view has
        return None
    return how if made is view else None


def _through(t: Any, steps: Sequence[Step]) -> Any:
    for op, args in steps:
        t = op(t, *args)
    return t


def spread(given: Sequence[Any], views: Sequence[View] | None) -> Sequence[Any]:
    """What a module returns, of the results of its node."""
    return given if views is None else [_through(given[view.of], view.steps) for view in views]
