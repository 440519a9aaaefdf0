"""Python containers indexed with a rank, in a process that runs the script once for several ranks: `files[rank]`, `batches[rank::n]`, `range(rank, n, size)`.

Python asks a number for one index and gets the first hosted rank's, so all ranks work with that rank's element. That is reported once for a line, unless the
elements are equal. Tensors never come here: `rank_ops`, `rank_tensor` and `rank_tensor_pieces` give each rank its own.
"""

from __future__ import annotations

import ast
import dis
import functools
import io
import mmap
import os
import sys
from collections import deque
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

from torch_bridge import source
from torch_bridge.mesh import rank_numbers
from torch_bridge.script import rank_stores, rank_syntax

_TAKING = {"BINARY_SUBSCR", "BINARY_SLICE", "STORE_SUBSCR", "STORE_SLICE", "BINARY_OP"}
_KNOWN = {"lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics"}
"""Libraries whose samplers keep their rank, of which `rank_loaders` makes a copy for each; and that put what a rank gathered from itself into its place again
(`rank_stores`)."""
_DATA = {"numpy", "datasets", "pandas", "pyarrow", "h5py", "zarr", "webdataset", "streaming"}
"""Libraries that hold data: what they are asked for by a rank's number is data of one rank."""
_TORCH_DATA = os.sep + os.path.join("torch", "utils", "data") + os.sep
_CONTAINERS = os.path.join("torch", "nn", "modules", "container.py")
_HOLDERS = (np.ndarray, deque, io.IOBase, mmap.mmap)
"""What methods in C change or read at a place: `array.take(rank, 0)`, `file.seek(rank * n)`."""
_reported: set[tuple[str, int]] = set()
Place = tuple[str, tuple[Any, ...]]


class Taken(NamedTuple):
    """The name of a file that a rank's number took out of a list: the first hosted rank's, what each rank of the world would have taken, and where it was."""

    first: Any
    each: tuple[Any, ...]
    places: frozenset[Place]


_MOST = 256
_taken: dict[int, Taken] = {}
"""By id of `first`, the newest last."""


def note(values: Sequence[int], hosted: Sequence[int]) -> bool:
    """A number that differs by rank has been asked for one index by the code that called its method. Whether it was for a subscript or a range."""
    frame = sys._getframe(3)
    place = (frame.f_code.co_filename, frame.f_lineno)
    folders = set(place[0].split(os.sep))
    if _DATA & folders or place[0].endswith(_CONTAINERS) or (_TORCH_DATA in place[0] and _asking(frame.f_code, frame.f_lasti) is not None):
        _note_library(frame, hosted)
        return True
    known = bool(_KNOWN & folders)
    if not known and not source.is_outside(frame.f_code):
        return True
    node = _asking(frame.f_code, frame.f_lasti)
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and not isinstance(node.slice, (ast.Slice, ast.Tuple)):
        say = (lambda: None) if known else functools.partial(_report_taken, node, frame, hosted)
        if rank_stores.for_each_rank(frame, _named(node.value, frame), values, hosted, say):
            return True
    if known:
        return True
    if node is None:
        return _note_method(frame, hosted)
    kept = isinstance(node, ast.Subscript) and _keep(node, frame, values, hosted)
    if place in _reported or (isinstance(node, ast.Subscript) and _alike(node, frame, [values[r] for r in hosted])):
        return True
    _report_taken(node, frame, hosted, ", but for a Dataset whose constructor is given it, which is made for each rank" if kept else "")
    return True


def _report_taken(node: ast.expr, frame: FrameType, hosted: Sequence[int], but: str = "") -> None:
    """Say of a line that it takes an index."""
    _report_once(
        frame,
        f"takes {ast.unparse(node)} by a number that differs by rank. This process runs the script once for {len(hosted)} ranks, and "
        f"Python takes it for rank {hosted[0]} alone: all ranks work with what is rank {hosted[0]}'s{but}. Have what depends on it made for each rank "
        "(torch_bridge.each_rank(lambda rank: make(files[rank]), rank)), use a tensor for what ranks differ in (torch.stack(list)[rank]), give a DataLoader "
        "the rank (DistributedSampler(rank=...)), or start one process per rank with torchrun.",
    )


def _note_library(frame: FrameType, hosted: Sequence[int]) -> None:
    """A library that holds data takes a number: whose is known by the line of the script that called it."""
    library = frame.f_code.co_filename
    at: FrameType | None = frame
    while at is not None and not rank_syntax.is_script(at.f_code):
        at = at.f_back
    if at is not None:
        name = next((part for part in library.split(os.sep) if part in _DATA), "torch.utils.data")
        what = "torch.nn take a module" if library.endswith(_CONTAINERS) else f"{name} take data"
        _report_call(at, f"has {what} by a number that differs by rank", hosted)


def _note_method(frame: FrameType, hosted: Sequence[int]) -> bool:
    """A method in C of an object that holds data takes a number; whether it is one."""
    node = rank_syntax.asking(frame)
    if (
        not isinstance(node, ast.Call)
        or not isinstance(node.func, ast.Attribute)
        or not isinstance(_named(node.func.value, frame), _HOLDERS)
    ):
        return False
    _report_call(frame, f"calls {ast.unparse(node)} with a number that differs by rank", hosted)
    return True


def _report_call(frame: FrameType, what: str, hosted: Sequence[int]) -> None:
    _report_once(
        frame,
        f"{what}. This process runs the script once for {len(hosted)} ranks, and it is taken for rank {hosted[0]} alone: all ranks work "
        f"with what is rank {hosted[0]}'s. Have what depends on it made for each rank (torch_bridge.each_rank(lambda rank: torch.tensor(...), rank)), give a "
        "DataLoader the rank (DistributedSampler(rank=...)), or start one process per rank with torchrun.",
    )


def _report_once(frame: FrameType, text: str) -> None:
    """Report something of the line that a frame is at, if nothing has been."""
    place = (frame.f_code.co_filename, frame.f_lineno)
    if place in _reported:
        return
    _reported.add(place)
    level, at = 1, sys._getframe()  # as `warnings.warn` counts
    while at is not frame and at.f_back is not None:
        level, at = level + 1, at.f_back
    rank_numbers.report(f"{place[0]}:{place[1]} {text}", level)


def taken(x: Any) -> Taken | None:
    """What a rank's number took out of a list, if this is the very object."""
    found = _taken.get(id(x))
    return found if found is not None and found.first is x else None


def _keep(node: ast.Subscript, frame: FrameType, values: Sequence[int], hosted: Sequence[int]) -> bool:
    """Remember the name of a file that is taken out of a list, tuple or dict with a name; whether it is one."""
    container = _named(node.value, frame)
    if type(container) not in (list, tuple, dict) or isinstance(node.slice, (ast.Slice, ast.Tuple)) or not isinstance(node.ctx, ast.Load):
        return False
    try:
        each = tuple(container[value] for value in values)
    except (LookupError, TypeError):
        return False
    first = each[hosted[0]]
    if not all(isinstance(x, (str, bytes, os.PathLike)) for x in each) or all(each[r] == first for r in hosted):
        return False
    before = _taken.pop(id(first), None)
    places = before.places if before is not None else frozenset()
    _taken[id(first)] = Taken(first, each, places | {(frame.f_code.co_filename, _position(node))})
    while len(_taken) > _MOST:
        _taken.pop(next(iter(_taken)))
    return True


@functools.lru_cache(maxsize=1024)
def _asking(code: CodeType, at: int) -> ast.expr | None:
    """The subscript, or the call of `range`, that this instruction is of; None for anything else, such as formatting."""
    name = dis.opname[code.co_code[at]]
    if name not in _TAKING and not name.startswith(("CALL", "PRECALL")):
        return None
    where = list(code.co_positions())[at // 2]
    tree = rank_syntax.tree(code.co_filename)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, (ast.Subscript, ast.Call)) and _position(node) == where:
            ranged = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("range", "islice")
            return node if isinstance(node, ast.Subscript) or ranged else None
    return None


def _position(node: ast.expr) -> tuple[Any, ...]:
    """As `co_positions` has it."""
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


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
