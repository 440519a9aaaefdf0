"""Where a script, or a library that calls it, would catch an error: its source says so."""

from __future__ import annotations

import ast
import builtins
import functools
from types import FrameType
from typing import Any

from torch_bridge import source
from torch_bridge.script import rank_syntax

_SWALLOW = ("raises", "RaisesExc", "RaisesGroup", "suppress", "assertRaises", "assertRaisesRegex", "ExitStack", "AsyncExitStack")
"""Context managers, by their names, that catch errors, or may hold one that does."""


Place = tuple[FrameType, int]
"""A frame, and the line of a `try` or `with` in it that it is inside of."""


def places(frame: FrameType | None, *errors: type[Exception]) -> set[Place]:
    """Each `try` whose `except` goes on after one of these errors, and each `with` that swallows it, at this frame or outside of it. torch's own and ours do
    not count. An `except` that raises another error in its place passes on that one, too."""
    found: set[Place] = set()
    names = frozenset(name for error in errors for name in _names(error))
    while frame is not None:
        code = frame.f_code
        if source.is_user(code):
            lines, raised = _around(code.co_filename, code.co_firstlineno, frame.f_lineno, names)
            while not raised <= names:
                names |= raised.union(*(_names(_value(frame, name)) for name in raised))
                lines, raised = _around(code.co_filename, code.co_firstlineno, frame.f_lineno, names)
            found.update((frame, line) for line in lines)
        frame = frame.f_back
    return found


def _names(error: object) -> list[str]:
    """Under which names an error is caught; none for what is no class."""
    return [name for t in error.__mro__ for name in (t.__name__, t.__name__.lstrip("_"))] if isinstance(error, type) else []


def _value(frame: FrameType, name: str) -> object:
    """What a global name stands for in a frame. Its locals are left alone: asking for them keeps their tensors."""
    return next((scope[name] for scope in (frame.f_globals, vars(builtins)) if name in scope), None)


def frames(frame: FrameType | None) -> set[FrameType]:
    """A frame and those outside of it."""
    found = set()
    while frame is not None:
        found.add(frame)
        frame = frame.f_back
    return found


@functools.cache
def _around(file: str, first: int, line: int, names: frozenset[str]) -> tuple[list[int], frozenset[str]]:
    """Around a line of a function that begins at `first`: where what catches errors of one of these names begins, and the names of what is raised in their
    place."""
    tree = rank_syntax.tree(file)
    lines: list[int] = []
    raised: set[str] = set()
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, (ast.Try, ast.With)) and node.lineno >= first and _covers(node.body, line):
            if isinstance(node, ast.With):
                caught = any(_swallows(item.context_expr) for item in node.items)
            else:
                handlers = [handler for handler in node.handlers if _named(handler.type, names)]
                caught = not all(map(_raises, handlers))
                raised.update(name for handler in handlers if (name := _raised_instead(handler)))
            if caught:
                lines.append(node.lineno)
    return lines, frozenset(raised)


def _covers(body: list[ast.stmt], line: int) -> bool:
    return body[0].lineno <= line <= (body[-1].end_lineno or 0)


def _named(caught: ast.expr | None, names: frozenset[str]) -> bool:
    """Whether `except caught:` is for an error of these names.."""
    if caught is None:
        return True
    each: list[Any] = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(rank_syntax.last_name(x) in names for x in each)


def _raises(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.body[-1], ast.Raise)


def _raised_instead(handler: ast.ExceptHandler) -> str:
    """The name of the error that is raised at a handler's end, "" if it is the one that was caught or there is none."""
    last = handler.body[-1]
    if not isinstance(last, ast.Raise) or last.exc is None:
        return ""
    name = rank_syntax.last_name(last.exc.func if isinstance(last.exc, ast.Call) else last.exc)
    return "" if name == handler.name else name


def _swallows(manager: ast.expr) -> bool:
    """Of one that was made before (`with self:` in unittest's `assertRaises(error, function)`) nothing is known: it may."""
    return not isinstance(manager, ast.Call) or rank_syntax.last_name(manager.func) in _SWALLOW
