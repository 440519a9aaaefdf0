"""`"%.3f" % loss.item()`, `array.array("f", [loss.item()])`, `memoryview(losses)`: C code that reads memory, and asks no method of a number or an array that
differs by rank.

It would get the first hosted rank's, for all, without a word. So where such a number is read from a tensor, the source of the function around is looked at:
what makes text or an array of it, and the names that it is assigned or appended to. If a function returns it, that of the caller.
"""

from __future__ import annotations

import array
import ast
import sys
from collections.abc import Iterator
from types import CodeType, FrameType

from torch_bridge import source
from torch_bridge.script import rank_branches, rank_syntax, rank_texts

_seen: dict[tuple[str, CodeType, int], bool] = {}
"""Places where numbers were read, and whether they go on to callers."""
_HOLDING = (ast.List, ast.Tuple, ast.Dict, ast.ListComp, ast.GeneratorExp, ast.Starred, ast.BinOp, ast.UnaryOp, ast.Call, ast.IfExp)
_CALLS = 3
"""Functions that return a number which are followed."""


def note() -> None:
    """A float that differs by rank has been read. Looked at once for a line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not source.is_outside(frame.f_code):
        frame = frame.f_back
    if frame is not None and rank_syntax.is_script(frame.f_code):
        _look(frame, _CALLS)


def note_array(frame: FrameType, node: ast.expr) -> None:
    """An array that differs by rank has been made by this expression: it is looked whether its memory is read."""
    scope = rank_syntax.Names(frame.f_locals, frame.f_globals)
    for use in _uses(node):
        if not isinstance(use, ast.Call):
            continue
        kind = scope.value(use.func)
        if kind is memoryview:
            rank_branches.note_made(frame, use, sure=True)
        elif kind in (bytes, bytearray):
            rank_branches.note_text(frame, use)


def _look(frame: FrameType, depth: int) -> None:
    place = (frame.f_code.co_filename, frame.f_code, frame.f_lasti)
    if place not in _seen:
        _seen[place] = False
        node = rank_syntax.asking(frame)
        _seen[place] = node is not None and _note_uses(frame, node)
    caller = frame.f_back
    if _seen[place] and depth and caller is not None and rank_syntax.is_script(caller.f_code):
        _look(caller, depth - 1)


def _note_uses(frame: FrameType, node: ast.expr) -> bool:
    """Note where an expression becomes text or an array; whether it is returned."""
    scope = rank_syntax.Names(frame.f_locals, frame.f_globals)
    returned = False
    for use in _uses(node):
        if isinstance(use, ast.Return):
            returned = True
        elif isinstance(use, ast.BinOp):
            rank_branches.note_text(frame, use)
        elif scope.value(use.func) is array.array:
            rank_branches.note_made(frame, use, sure=True)
    return returned


def _uses(node: ast.expr) -> Iterator[ast.BinOp | ast.Call | ast.Return]:
    """Texts that are formatted with an expression, calls that hold it in an argument, and the statement that returns it; by name too."""
    inner: ast.AST = node
    for outer in rank_syntax.parents(node):
        if isinstance(outer, ast.Return):
            yield outer
        elif isinstance(outer, ast.BinOp):
            if (text := rank_texts.formatting(inner)) is not None:
                yield text
                return
        elif isinstance(outer, ast.Tuple) and (text := rank_texts.formatting(inner)) is not None:
            yield text
            return
        elif isinstance(outer, ast.Call) and inner in outer.args:
            yield outer
            if isinstance(outer.func, ast.Attribute) and outer.func.attr == "append" and isinstance(outer.func.value, ast.Name):
                yield from _by_name(outer.func.value.id, outer)
        elif isinstance(outer, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            for target in outer.targets if isinstance(outer, ast.Assign) else [outer.target]:
                if isinstance(target, ast.Name):
                    yield from _by_name(target.id, outer)
        if not isinstance(outer, _HOLDING):
            return
        inner = outer


def _by_name(name: str, at: ast.AST) -> Iterator[ast.BinOp | ast.Call | ast.Return]:
    """The same of a name in the same function."""
    for held in ast.walk(rank_syntax.function_of(at)):
        if not (isinstance(held, ast.Name) and held.id == name and isinstance(held.ctx, ast.Load)):
            continue
        if (text := rank_texts.formatting(held)) is not None:
            yield text
        inner: ast.AST = held
        for outer in rank_syntax.parents(held):
            if isinstance(outer, ast.Return) or (isinstance(outer, ast.Call) and inner in outer.args):
                yield outer
            if not isinstance(outer, (ast.List, ast.Tuple, ast.BinOp, ast.UnaryOp)):
                break
            inner = outer
