"""Results that XLA for CPUs is made to store: sines and cosines that larger values read, and transposes of gradients before products.

A function that XLA inlines is computed wherever it is read. Here it is a call that XLA leaves, a loop of its own, whose result the others read.

XLA takes a sine for as cheap as a product, and on CPUs it is a call of the C library. Those of rotary position embeddings, a few thousand numbers, are read by
every layer, forward and backward, for each head of each sequence: 24 fusions of a Llama of 8 layers computed them again. What only values of its own size read
stays with XLA: a loop of its own costs more than computing it again.

A weight's gradient, `grad.t() @ x`, reads its first operand down the columns. XLA computes that in Eigen, which packs it slowly, and with the transpose stored
in YNNPACK: for up to `stored.LARGEST` elements the whole takes 0.5 to 0.9 of the time, whatever the dtype. (A barrier keeps the product apart from the
transpose, too, but what the gradient is made of is then computed again in the order of its columns.)

| CPU time of a step (`benchmarks/zoo.py`, medium), in turn | inlined | stored |
|---|---|---|
| Llama | 120 ms | 102 ms |
| BERT | 120 ms | 111 ms |
| GPT-2 | 117 ms | 108 ms |
| LSTM | 54.6 ms | 50.6 ms |
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch import fx

from torch_bridge import lowerings
from torch_bridge.compiler import transposed_products
from torch_bridge.lowerings import stored

aten = torch.ops.aten
STORED = "stored"
"""Of a node's `meta`: True if its result is stored."""
_OPS = frozenset({aten.sin.default, aten.cos.default})


def mark(graph: fx.Graph) -> None:
    """Mark such nodes of a graph that runs on the default backend."""
    if jax.default_backend() != "cpu":
        return
    for node in graph.nodes:
        if node.target in _OPS and not node.meta["val"].is_complex() and _size(node) >= stored.FEWEST and _is_read_by_larger(node):
            node.meta[STORED] = True
    for node in transposed_products.to_transpose_first(graph):
        if stored.pays(node.meta["val"].shape):
            node.meta[STORED] = True


def call(op: Any, x: Any, *more: Any) -> Any:
    """A marked op on a JAX value, its result stored. more: its other arguments, numbers."""
    return stored.call(_function(op, *map(_hashable, more)), x)


def _hashable(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, list) else argument


@functools.lru_cache(maxsize=1024)
def _function(op: torch._ops.OpOverload, *more: Any) -> Callable[[Any], Any]:
    found = lowerings.lookup(op)
    assert found is not None, op
    return lambda x: found.fn(x, *more)


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
