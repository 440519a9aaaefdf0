"""`torch.Tensor([loss.item()])`: C code that reads a float's memory, and asks no method of a number that differs by rank.

It would get the first hosted rank's, for all, without a word. So where such a number is read from a tensor, the source of the function around is looked at: the
call that holds it, and the names that it is assigned or appended to.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from types import CodeType, FrameType

import torch

from torch_bridge import source
from torch_bridge.mesh import rank_numbers
from torch_bridge.script import rank_syntax

_seen: set[tuple[str, CodeType, int]] = set()
_HOLDING = (ast.List, ast.Tuple, ast.ListComp, ast.GeneratorExp, ast.Starred, ast.BinOp, ast.UnaryOp, ast.Call, ast.IfExp)


def note() -> None:
    """A float that differs by rank has been read. Said once for a line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not source.is_outside(frame.f_code):
        frame = frame.f_back
    if frame is None or (place := (frame.f_code.co_filename, frame.f_code, frame.f_lasti)) in _seen:
        return
    _seen.add(place)
    node = rank_syntax.asking(frame) if rank_syntax.is_script(frame.f_code) else None
    if node is None:
        return
    scope = rank_syntax.Names(frame.f_locals, frame.f_globals)
    call = next((c for c in _calls_with(node) if scope.value(c.func) is torch.Tensor), None)
    if call is not None:
        rank_numbers.report(
            f"{frame.f_code.co_filename}:{frame.f_lineno} reads a number that differs by rank, and line {call.lineno} gives it to torch.Tensor "
            f"({ast.unparse(call)}), which takes the first rank's for all ranks of this process. Write torch.tensor({ast.unparse(call.args[0])}), which has "
            "each rank's own, or start one process per rank with torchrun.",
            4,
        )


def _calls_with(node: ast.expr) -> Iterator[ast.Call]:
    """Calls of one argument that hold an expression in it, by name too."""
    inner: ast.AST = node
    for outer in rank_syntax.parents(node):
        if isinstance(outer, ast.Call) and outer.args == [inner]:
            yield outer
            if isinstance(outer.func, ast.Attribute) and outer.func.attr == "append" and isinstance(outer.func.value, ast.Name):
                yield from _calls_of(outer.func.value.id, outer)
        if isinstance(outer, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            for target in outer.targets if isinstance(outer, ast.Assign) else [outer.target]:
                if isinstance(target, ast.Name):
                    yield from _calls_of(target.id, outer)
        if not isinstance(outer, _HOLDING):
            return
        inner = outer


def _calls_of(name: str, at: ast.AST) -> Iterator[ast.Call]:
    """Calls in the same function whose one argument has this name in it."""
    for call in ast.walk(rank_syntax.function_of(at)):
        if isinstance(call, ast.Call) and len(call.args) == 1:
            held = call.args[0].elts if isinstance(call.args[0], (ast.List, ast.Tuple)) else [call.args[0]]
            if any(isinstance(x, ast.Name) and x.id == name for x in held):
                yield call
