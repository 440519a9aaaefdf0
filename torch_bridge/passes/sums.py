"""Sums of many tensors of one shape: autograd adds up what each use of a value gives, two at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import fx

from torch_bridge.passes.find_repeats import aval

aten = torch.ops.aten


class Sum(NamedTuple):
    """What a sum of sums adds up.

    adders: its nodes, each before those that it adds. terms: what is added, with the node that adds it, in order. straight: terms are added one by one.
    """

    adders: list[fx.Node]
    terms: list[tuple[fx.Node, fx.Node]]
    straight: bool


def sums(graph: fx.Graph) -> Iterator[tuple[fx.Node, Sum]]:
    """The sums of a graph that are no part of another, last first. The graph may change meanwhile."""
    seen: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if _adds(node) and node not in seen:
            found = _added_up(node)
            seen.update(found.adders)
            yield node, found


def _adds(node: fx.Node) -> bool:
    """Whether a node adds two tensors of its own shape and dtype."""
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs or node.args[0] is node.args[1]:
        return False
    return all(isinstance(x, fx.Node) and aval(x) == aval(node) for x in node.args)


def _added_up(root: fx.Node) -> Sum:
    adders: list[fx.Node] = []
    terms: list[tuple[fx.Node, fx.Node]] = []
    left, straight = [root], True
    while left:
        node = left.pop()
        adders.append(node)
        inner: list[fx.Node] = [x for x in node.args if isinstance(x, fx.Node) and _adds(x) and len(x.users) == 1]
        straight = straight and len(inner) < 2
        terms.extend((x, node) for x in reversed(node.args) if x not in inner)  # type: ignore[misc]
        left.extend(inner)
    return Sum(adders, terms[::-1], straight)
