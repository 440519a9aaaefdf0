"""How a broken rule is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import fx

from torch_bridge.errors import VerificationError
from torch_bridge.source import NOWHERE, Source


def fail(after: str, rule: str, found: str, where: str = "") -> NoReturn:
    """Raise the error. after: the pass that ran last; rule: what must hold; found: what is there instead; where: the node."""
    at = f"\n  at {where}" if where else ""
    raise VerificationError(
        f"after {after}, a rule of torch_bridge does not hold: {rule}. Found: {found}.{at}\n"
        "  This is a bug of torch_bridge, not of the script: please report it with this text and the program. "
        "(Checked because of NXD_JAX_VERIFY=1; without it the program runs unchecked, and its results may be wrong.)"
    )


def in_segment(nodes: Sequence[tuple[Any, ...]], sources: Sequence[Source], index: int) -> str:
    """A recorded node in words."""
    source = sources[index] if index < len(sources) else NOWHERE
    return f"node {index} ({nodes[index][0].op}), {source}"


def in_graph(node: fx.Node) -> str:
    """A node of a graph in words: its name, op and line."""
    return f"%{node.name} ({node.target}), {node.meta.get('source', NOWHERE)}"
