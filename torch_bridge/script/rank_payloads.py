"""Bytes made of a number that differs by rank: `xm.rendezvous(tag, f"{rank}".encode())`.

Bytes have no room for all ranks' numbers: they are made of the first hosted rank's. Where ranks exchange them, the call that does is looked at, and the
assignments of the names in it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch_bridge.mesh import rank_numbers
from torch_bridge.script import rank_syntax

_LIBRARIES = ("torch_bridge", "nxd_jax", "torch.distributed")
_seen: set[tuple[str, int]] = set()


def note(place: int, name: str) -> None:
    """The caller's caller gives bytes to be exchanged, as this argument, in a process that hosts several ranks. Said once for a line."""
    frame = sys._getframe(2)
    at = (frame.f_code.co_filename, frame.f_lineno)
    if at in _seen or not rank_syntax.is_script(frame.f_code):
        return
    call = rank_syntax.asking(frame)
    if not isinstance(call, ast.Call):
        return
    given = [*call.args[place : place + 1], *(k.value for k in call.keywords if k.arg == name)]
    if not any(_differs(node, frame) for start in given for node in _made_of(start)):
        return
    _seen.add(at)
    rank_numbers.report(
        f"{at[0]}:{at[1]} exchanges bytes made of a number that differs by rank ({ast.unparse(given[0])}). This process runs the script once for several "
        "ranks, and its first rank's bytes stand for all of them. Use xm.mesh_reduce(tag, number, list), which has each rank's own number, or start one "
        "process per rank with torchrun.",
        3,
    )


def note_text(frame: FrameType | None) -> None:
    """An object is about to go to other ranks, which is one for all of them but for the numbers in it: say so if text in it is made of such a number."""
    while frame is not None and not rank_syntax.is_script(frame.f_code):
        frame = frame.f_back
    if frame is None or (at := (frame.f_code.co_filename, frame.f_lineno)) in _seen:
        return
    call = rank_syntax.asking(frame)
    given = [*call.args, *(k.value for k in call.keywords)] if isinstance(call, ast.Call) else []
    text = next(
        (node for start in given for node in _made_of(start) if _is_text(node) and any(_differs(n, frame) for n in ast.walk(node))), None
    )
    if text is None:
        return
    _seen.add(at)
    rank_numbers.report(
        f"{at[0]}:{at[1]} gives other ranks text made of a number that differs by rank ({ast.unparse(text)}). This process runs the script once for several "
        "ranks, and its first rank's text stands for all of them. Give the number itself, of which each rank's own is sent, or start one process per rank with "
        "torchrun.",
        3,
    )


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("str", "repr")
    )


def _made_of(start: ast.expr) -> Iterator[ast.AST]:
    """The nodes of an expression, and of what the function around it assigns to the names in it."""
    waiting: list[ast.AST] = [start]
    done: set[str] = set()
    while waiting:
        for node in ast.walk(waiting.pop()):
            yield node
            if isinstance(node, ast.Name) and node.id not in done:
                done.add(node.id)
                for other in ast.walk(rank_syntax.function_of(start)):
                    if isinstance(other, ast.Assign) and any(isinstance(t, ast.Name) and t.id == node.id for t in other.targets):
                        waiting.append(other.value)


def _differs(node: ast.AST, frame: FrameType) -> bool:
    names = rank_syntax.Names(frame.f_locals, frame.f_globals)
    if isinstance(node, ast.Call) and not node.args and not node.keywords:
        function = names.value(node.func)
        return _answers_for_ranks(function) and rank_numbers.is_ranked(function())
    return rank_numbers.is_ranked(names.value(node))


def _answers_for_ranks(function: Any) -> bool:
    """Whether it is a library's `get_ordinal()`, `get_rank()` and the like, which may be asked again."""
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__name__", "")
    return module.startswith(_LIBRARIES) and name.startswith("get_") and name.endswith(("ordinal", "rank"))
