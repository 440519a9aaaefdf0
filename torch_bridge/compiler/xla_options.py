"""The XLA options that a program is compiled with (`compiler_options` of `jax.jit`), where XLA's own choice is known to be wrong or slow."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
from torch import fx

from torch_bridge import _compat
from torch_bridge.config import freed_memory, library_fusions

_ALWAYS = {library_fusions.OPTION: library_fusions.VALUE}
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
    wanted: dict[str, Any] = dict(_ALWAYS)
    if any(str(node.target) == _APART for node in graph.nodes):
        wanted |= _WITH_BARRIERS
    block = None if serialized else freed_memory.largest_block()
    if block is not None:
        wanted[_LARGEST_BLOCK] = block
    return _taken(wanted)


def without_graph() -> dict[str, Any] | None:
    """The options for what is compiled without a graph of aten ops at hand: a traced model from its file, a single op."""
    return _taken(_ALWAYS)


def _taken(wanted: dict[str, Any]) -> dict[str, Any] | None:
    if jax.default_backend() != "cpu":
        return None
    return {name: value for name, value in wanted.items() if _known(name, value)} or None


def in_blocks(options: dict[str, Any] | None) -> bool:
    """Whether options (of `of`) have temporaries lie in several blocks."""
    return options is not None and _LARGEST_BLOCK in options


@functools.cache
def _known(name: str, value: str | int) -> bool:
    """Whether this process may set an option: the jaxlib knows it, and `XLA_FLAGS` does not name it."""
    return name not in os.environ.get("XLA_FLAGS", "") and _compat.knows_options({name: value})
