"""The XLA options that a program is compiled with (`compiler_options` of `jax.jit`), where XLA's own choice is known to be slow."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import torch
from torch import fx

from torch_bridge import _compat
from torch_bridge.config import freed_memory
from torch_bridge.lowerings import is_view

aten = torch.ops.aten

_CONVOLUTIONS = frozenset(
    {
        aten.convolution.default,
        aten._convolution.default,
        aten.convolution_overrideable.default,
        aten.convolution_backward.default,
        aten.convolution_backward_overrideable.default,
    }
)
_LIBRARY_FUSIONS = "xla_cpu_experimental_ynn_fusion_type"
_ALL_BUT_CONVOLUTIONS = {_LIBRARY_FUSIONS: "LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_REDUCE"}
"""On CPUs XLA gives convolutions to YNNPACK, which computes many of them on one thread. Without it they run in Eigen on all of them."""

_EACH_PRODUCT_ALONE = {_LIBRARY_FUSIONS: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
"""On CPUs XLA lets YNNPACK compute a product and what reads it as one. In jaxlib 0.10.2 and 0.11.2 that gives wrong numbers where an operand is one matrix for
the whole batch (K/V heads that are repeated, `expand`) and sums follow (softmax and its gradient). Products alone are right. A Llama's step takes 1.1x so."""
_BATCHED_PRODUCTS = frozenset({aten.bmm.default, aten.baddbmm.default})
_PASSES_ON = frozenset({aten.where.self, aten.clone.default, aten._to_copy.default, aten.alias.default})
"""Ops beside views whose results XLA may know as the broadcast that they read."""

_LARGEST_BLOCK = "xla_multiheap_size_constraint_per_heap"
"""Bytes of the blocks that hold a program's temporaries; a tensor that is larger has one of its own."""
_APART = "torch_bridge.apart.default"
_WITHOUT_PASSES = "xla_disable_hlo_passes"
_WITH_BARRIERS = {_WITHOUT_PASSES: "cse_barrier_expander"}
"""On CPUs XLA drops barriers before it merges equal computations for the last time: what parameters are gathered again for would stay (`fsdp.apart`)."""


def of(graph: fx.Graph, serialized: bool = False) -> dict[str, Any] | None:
    """The options for a program of this graph of aten ops; None: XLA's own. What `XLA_FLAGS` says of an option stands.

    serialized: its executable is to be written to disk, or copied to other devices. On CPUs XLA refuses that for temporaries in several blocks.
    """
    wanted: dict[str, Any] = {}
    if count_of_convolutions(graph):
        wanted |= _ALL_BUT_CONVOLUTIONS
    if multiplies_broadcasts(graph):
        wanted |= _EACH_PRODUCT_ALONE
    if any(str(node.target) == _APART for node in graph.nodes):
        wanted |= _WITH_BARRIERS
    block = None if serialized else freed_memory.largest_block()
    if block is not None:
        wanted[_LARGEST_BLOCK] = block
    if not wanted or jax.default_backend() != "cpu":
        return None
    return {name: value for name, value in wanted.items() if _known(name, value)} or None


def multiplies_broadcasts(graph: fx.Graph) -> bool:
    """Whether a batched product of a graph of aten ops may read a tensor that was expanded."""
    expanded: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is aten.expand.default:
            expanded.add(node)
        elif expanded.intersection(node.all_input_nodes):
            if node.target in _BATCHED_PRODUCTS:
                return True
            if node.target in _PASSES_ON or (node.op == "call_function" and is_view(node.target)):
                expanded.add(node)
    return False


def in_blocks(options: dict[str, Any] | None) -> bool:
    """Whether options (of `of`) have temporaries lie in several blocks."""
    return options is not None and _LARGEST_BLOCK in options


def count_of_convolutions(graph: fx.Graph) -> int:
    """How many convolutions there are in a graph of aten ops, forward and backward."""
    return sum(node.target in _CONVOLUTIONS for node in graph.nodes)


@functools.cache
def _known(name: str, value: str | int) -> bool:
    """Whether this process may set an option: the jaxlib knows it, and `XLA_FLAGS` does not name it."""
    return name not in os.environ.get("XLA_FLAGS", "") and _compat.knows_options({name: value})
