"""Sines and cosines that larger values read: on CPUs they are stored, where XLA would compute them again for every element that reads them.

XLA takes them for as cheap as a product, and on CPUs they are calls of the C library. Those of rotary position embeddings, a few thousand numbers, are read by
every layer, forward and backward, for each head of each sequence: 24 fusions of a Llama of 8 layers computed both. Here they are calls that XLA does not
inline, one loop each, whose result the others read. What only values of its own size read stays with XLA: a loop of its own costs more than computing it again.

A step of the benchmarks' Llama (medium) takes 0.95x of its time with this, of the small one 0.93x.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch import fx

from torch_bridge import _compat, lowerings

aten = torch.ops.aten
FEWEST = 1024
"""Elements from which on a loop of its own pays."""
STORED = "stored"
"""Of a node's `meta`: True if its result is stored."""
_OPS = frozenset({aten.sin.default, aten.cos.default})


def mark(graph: fx.Graph) -> None:
    """Mark such nodes of a graph that runs on the default backend."""
    if jax.default_backend() != "cpu":
        return
    for node in graph.nodes:
        if node.target in _OPS and not node.meta["val"].is_complex() and _size(node) >= FEWEST and _is_read_by_larger(node):
            node.meta[STORED] = True


def call(op: Any, x: Any) -> Any:
    """A marked op on a JAX value, its result stored."""
    with _compat.not_inlined():
        return _called(op)(x)


@functools.cache
def _called(op: torch._ops.OpOverload) -> Callable[[Any], Any]:
    found = lowerings.lookup(op)
    assert found is not None, op
    return jax.jit(found.fn)


def _is_read_by_larger(node: fx.Node) -> bool:
    """Whether an elementwise op that gives more elements reads it, through elementwise ops and views if need be."""
    size, seen, left = _size(node), {node}, [node]
    while left:
        for user in left.pop().users:
            if user in seen or not _is_elementwise(user):
                continue
            if _size(user) > size:
                return True
            seen.add(user)
            if _size(user) == size:
                left.append(user)
    return False


def _is_elementwise(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    found = lowerings.lookup(node.target)
    return torch.Tag.pointwise in node.target.tags or (found is not None and (found.view or found.cast))


def _size(node: fx.Node) -> int:
    return math.prod(node.meta["val"].shape)
