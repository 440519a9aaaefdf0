"""Python containers indexed with a rank, in a process that runs the script once for several ranks: `files[rank]`, `batches[rank::n]`, `range(rank, n, size)`.

Python asks a number for one index and gets the first hosted rank's, so all ranks work with that rank's element. That is reported once for a line, unless the
elements are equal. Tensors never come here: `rank_ops`, `rank_tensor` and `rank_pieces` give each rank its own.
"""

from __future__ import annotations

import ast
import dis
import os
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any

from torch_bridge import branches, source

_TAKING = {"BINARY_SUBSCR", "BINARY_SLICE", "STORE_SUBSCR", "STORE_SLICE", "BINARY_OP"}
_KNOWN = {"lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics"}
"""Libraries whose samplers keep their rank, of which `rank_data` makes a copy for each; and that put what a rank gathered from itself into its place again,
which is right for rank 0, whose numbers are read."""
_reported: set[tuple[str, int]] = set()


def note(values: Sequence[int], hosted: Sequence[int]) -> None:
    """A number that differs by rank has been asked for one index by the code that called its method."""
    frame = sys._getframe(3)
    place = (frame.f_code.co_filename, frame.f_lineno)
    if place in _reported or not source.is_outside(frame.f_code) or _KNOWN & set(place[0].split(os.sep)):
        return
    node = _asking(frame)
    if node is None or (isinstance(node, ast.Subscript) and _alike(node, frame, [values[r] for r in hosted])):
        return
    _reported.add(place)
    warnings.warn(
        f"{place[0]}:{place[1]} takes {ast.unparse(node)} by a number that differs by rank. This process runs the script once for {len(hosted)} ranks, and "
        f"Python takes it for rank {hosted[0]} alone: all ranks work with what is rank {hosted[0]}'s. Use a tensor for what ranks differ in "
        "(torch.stack(list)[rank]), give a DataLoader the rank (DistributedSampler(rank=...)), or start one process per rank with torchrun.",
        stacklevel=4,
    )


def _asking(frame: FrameType) -> ast.expr | None:
    """The subscript, or the call of `range`, that the frame is at; None for anything else, such as formatting."""
    code = frame.f_code
    name = dis.opname[code.co_code[frame.f_lasti]]
    if name not in _TAKING and not name.startswith(("CALL", "PRECALL")):
        return None
    where = list(code.co_positions())[frame.f_lasti // 2]
    tree = branches._tree(code.co_filename)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, (ast.Subscript, ast.Call)) and (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == where:
            ranged = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("range", "islice")
            return node if isinstance(node, ast.Subscript) or ranged else None
    return None


def _alike(node: ast.Subscript, frame: FrameType, values: Sequence[int]) -> bool:
    """Whether a container that has a name holds the same for all ranks."""
    container = _named(node.value, frame)
    if container is None or isinstance(node.slice, (ast.Slice, ast.Tuple)) or isinstance(node.ctx, ast.Store):
        return False
    try:
        first, *others = [container[value] for value in values]
        return all(bool(x is first or (type(x) is type(first) and x == first)) for x in others)
    except Exception:  # whatever the container is: it does not say
        return False


def _named(node: ast.expr, frame: FrameType) -> Any:
    """The value of `name` or `name.attribute`; None for anything else, which asking might change."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return getattr(_named(node.value, frame), "__dict__", {}).get(node.attr)
    return None
