"""Branches that only raise, and assertions: `if not (boxes >= 0).all(): raise ValueError(...)`. Which answer goes on, and what is raised otherwise."""

from __future__ import annotations

import ast
import builtins
import dis
from types import CodeType, FrameType
from typing import NamedTuple

from torch_bridge.script import rank_syntax


class Guard(NamedTuple):
    """A truth that only decides whether an error is raised. answer: the one that goes on; error: the name of a built-in exception; text: what it says."""

    answer: bool
    error: str
    text: str


_KNOWN: dict[tuple[str, CodeType, int], Guard | None] = {}


def at(frame: FrameType) -> Guard | None:
    """The guard that a frame asks a truth for, None if the truth decides more."""
    key = frame.f_code.co_filename, frame.f_code, frame.f_lasti
    if key not in _KNOWN:
        asked = _asked(frame)
        _KNOWN[key] = None if asked is None else _guard(asked)
    return _KNOWN[key]


def _asked(frame: FrameType) -> ast.expr | None:
    """The expression whose truth a frame asks for: the instruction before made its value. None if no expression stands exactly there."""
    code, unit = frame.f_code, frame.f_lasti // 2 - 1
    while unit >= 0 and code.co_code[2 * unit] == dis.EXTENDED_ARG:
        unit -= 1
    place = list(code.co_positions())[unit] if unit >= 0 else (None,) * 4
    tree = rank_syntax.tree(code.co_filename)
    if tree is None or None in place:
        return None
    found = [n for n in ast.walk(tree) if isinstance(n, ast.expr) and (n.lineno, n.end_lineno, n.col_offset, n.end_col_offset) == place]
    return found[0] if len(found) == 1 else None


def _guard(asked: ast.expr) -> Guard | None:
    if isinstance(asked, ast.Compare) and len(asked.ops) > 1:
        return None
    answer, inner = _wanted(asked)
    outer = next(rank_syntax.parents(inner), None)
    if isinstance(outer, ast.Assert) and inner is outer.test:
        wanted, error, said = True, "AssertionError", outer.msg
    elif isinstance(outer, ast.If) and inner is outer.test and len(outer.body) == 1 and isinstance(outer.body[0], ast.Raise):
        raised = outer.body[0].exc
        wanted, error, said = False, *_error(raised)
    else:
        return None
    if not _is_builtin(error) or not _decides(asked, inner, wanted):
        return None
    text = f"{_text(said)}: " if said is not None else ""
    return Guard(answer is wanted, error, f"{text}`{ast.unparse(asked)}` is {answer is not wanted}")


def _wanted(asked: ast.expr) -> tuple[bool, ast.expr]:
    """Whether the test is as the asked truth (or its opposite), and the test: what is outside of its `not`, `and`, `or`."""
    same, inner = True, asked
    for outer in rank_syntax.parents(asked):
        if isinstance(outer, ast.UnaryOp) and isinstance(outer.op, ast.Not):
            same = not same
        elif not isinstance(outer, ast.BoolOp):
            break
        inner = outer
    return same, inner


def _decides(asked: ast.expr, test: ast.expr, wanted: bool) -> bool:
    """Whether a test that is as wanted follows from each truth that goes on, and another from each that does not, whatever comes after them in the test."""
    path = [asked, *(p for p in rank_syntax.parents(asked))]
    path = path[: path.index(test) + 1]
    for inner, outer in zip(reversed(path[:-1]), reversed(path[1:]), strict=True):
        if isinstance(outer, ast.UnaryOp):
            wanted = not wanted
        elif isinstance(outer, ast.BoolOp) and isinstance(outer.op, ast.And) is not wanted and inner is not outer.values[-1]:
            return False
    return True


def _error(raised: ast.expr | None) -> tuple[str, ast.expr | None]:
    """The name of what is raised, and what it says."""
    if isinstance(raised, ast.Call) and isinstance(raised.func, ast.Name) and len(raised.args) < 2 and not raised.keywords:
        return raised.func.id, raised.args[0] if raised.args else None
    return (raised.id, None) if isinstance(raised, ast.Name) else ("", None)


def _is_builtin(name: str) -> bool:
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, (StopIteration, StopAsyncIteration))


def _text(said: ast.expr) -> str:
    """A message as the source has it; what an f-string would put in stands in braces."""
    if isinstance(said, ast.Constant):
        return str(said.value)
    if isinstance(said, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else f"{{{ast.unparse(v.value)}}}" for v in said.values)  # type: ignore[attr-defined]
    return ast.unparse(said)
