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
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

from torch_bridge import source
from torch_bridge.mesh import rank_numbers, world
from torch_bridge.script import rank_memory_reads, rank_stores, rank_syntax

_TAKING = {"BINARY_SUBSCR", "BINARY_SLICE", "STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR", "BINARY_OP"}
_KNOWN = {"lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics"}
"""Libraries whose samplers keep their rank, of which `rank_loaders` makes a copy for each; and that put what a rank gathered from itself into its place again
(`rank_stores`)."""
_DATA = {"numpy", "datasets", "pandas", "pyarrow", "h5py", "zarr", "webdataset", "streaming"}
"""Libraries that hold data: what they are asked for by a rank's number is data of one rank."""
_TORCH_DATA = os.sep + os.path.join("torch", "utils", "data") + os.sep
_CONTAINERS = os.path.join("torch", "nn", "modules", "container.py")
_HOLDERS = (np.ndarray, list, bytearray, deque, io.IOBase, mmap.mmap)
"""What methods in C change or read at a place: `array.take(rank, 0)`, `parts.pop(rank)`, `file.seek(rank * n)`."""
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
    one = isinstance(node, ast.Subscript) and not isinstance(node.slice, (ast.Slice, ast.Tuple))
    reads = one and dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("BINARY")  # `parts[rank] += x` does both
    if isinstance(node, ast.Subscript) and reads and not known:
        if rank_stores.read_by_each_rank(frame, _named(node.value, frame), node, values, hosted):
            return True
    elif isinstance(node, ast.Subscript) and one and not reads and isinstance(node.ctx, ast.Store):
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


def note_table(frame: FrameType, what: str, hosted: Sequence[int]) -> None:
    """Something is done to a table of pandas by a rank's number, the first hosted rank's for all."""
    at: FrameType | None = frame
    while at is not None and not rank_syntax.is_script(at.f_code):
        at = at.f_back
    if at is not None:
        _report_call(at, f"has pandas {what} by a number that differs by rank", hosted)


def note_array(libraries: tuple[str, ...], is_index: bool) -> None:
    """An array that differs by rank has been made. libraries: the folders of those that may have made it; is_index: it has places or truths.

    NumPy writes it to a plain array for the first hosted rank (`found[a:b] = scores.numpy()`), and indexes one with it for that rank. Libraries that hold data
    take rows for that one (`frame[frame["part"] == rank]`).
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (not source.is_outside(frame.f_code) or frame.f_code.co_filename.startswith(libraries)):
        frame = frame.f_back
    if frame is None or (place := (frame.f_code.co_filename, frame.f_code, frame.f_lasti)) in _arrays:
        return
    _arrays.add(place)
    hosted = world.current().hosted
    if _DATA & set(frame.f_code.co_filename.split(os.sep)):
        if is_index:
            _note_library(frame, hosted)
    elif rank_syntax.is_script(frame.f_code) and (node := rank_syntax.asking(frame)) is not None:
        rank_memory_reads.note_array(frame, node)
        scope = rank_syntax.Names(frame.f_locals, frame.f_globals)
        taken = next((s for s in _indexed_with(node) if _is_plain_array(s.value, scope)), None) if is_index else None
        written = next((s for s in _written_with(node) if _is_plain_array(s.value, scope)), None) if taken is None else None
        if taken is not None:
            _report_call(
                frame, f"has NumPy or pandas take {ast.unparse(taken)} (line {taken.lineno}) by an array that differs by rank", hosted
            )
        elif written is not None:
            what = f"writes an array that differs by rank to {ast.unparse(written)} (line {written.lineno}), which is one for all ranks"
            _report_call(frame, what, hosted)


_arrays: set[tuple[str, CodeType, int]] = set()


def _indexed_with(node: ast.expr) -> Iterator[ast.Subscript]:
    """The subscripts that an expression is the index of, or part of it, by name too."""
    inner: ast.AST = node
    for outer in rank_syntax.parents(node):
        if isinstance(outer, ast.Subscript) and outer.slice is inner:
            yield outer
            return
        if isinstance(outer, ast.Assign):
            names = {t.id for t in outer.targets if isinstance(t, ast.Name)}
            for other in ast.walk(rank_syntax.function_of(outer)):
                if isinstance(other, ast.Subscript) and isinstance(other.slice, ast.Name) and other.slice.id in names:
                    yield other
        if not isinstance(outer, (ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Tuple, ast.Subscript, ast.Attribute)):
            return
        inner = outer


def _written_with(node: ast.expr) -> Iterator[ast.Subscript]:
    """Where an expression is written to a place of something, by name too."""
    for outer in rank_syntax.parents(node):
        if isinstance(outer, ast.Assign):
            names = {t.id for t in outer.targets if isinstance(t, ast.Name)}
            later = (x for x in ast.walk(rank_syntax.function_of(outer)) if isinstance(x, ast.Assign)) if names else ()
            same = [outer, *(x for x in later if isinstance(x.value, ast.Name) and x.value.id in names)]
            yield from (t for x in same for t in x.targets if isinstance(t, ast.Subscript))
        if not isinstance(outer, (ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Attribute)):
            return


def _is_plain_array(node: ast.expr, scope: rank_syntax.Names) -> bool:
    """Whether this is an array of NumPy's that is one for all ranks, or something of pandas'."""
    value = scope.value(node)
    if isinstance(node, ast.Name) and value is None:  # it has no value yet
        given = (x for x in ast.walk(rank_syntax.function_of(node)) if isinstance(x, ast.Assign))
        calls = (
            x.value for x in given if isinstance(x.value, ast.Call) and any(isinstance(t, ast.Name) and t.id == node.id for t in x.targets)
        )
        return any(_is_plain_array(call, scope) for call in calls)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return rank_syntax.root_module(scope, node.func) == "numpy"
    return type(value) is np.ndarray or type(value).__module__.startswith("pandas")


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
            ranged = isinstance(node, ast.Call) and rank_syntax.last_name(node.func) in ("range", "islice")
            return node if isinstance(node, ast.Subscript) or ranged else None
    return None


def _position(node: ast.expr) -> tuple[Any, ...]:
    """As `co_positions` has it."""
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _alike(node: ast.Subscript, frame: FrameType, values: Sequence[int]) -> bool:
    """Whether a container that has a name holds the same for all ranks."""
    container = _named(node.value, frame)
    if container is None or isinstance(node.slice, (ast.Slice, ast.Tuple)) or not isinstance(node.ctx, ast.Load):
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
