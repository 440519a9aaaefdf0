"""Where a script, or a library that calls it, would catch an error: its source says so."""

from __future__ import annotations

import ast
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
    not count."""
    found: set[Place] = set()
    names = tuple(dict.fromkeys(name for error in errors for t in error.__mro__ for name in (t.__name__, t.__name__.lstrip("_"))))
    while frame is not None:
        code = frame.f_code
        if source.is_user(code):
            found.update((frame, line) for line in _lines(code.co_filename, code.co_firstlineno, frame.f_lineno, names))
        frame = frame.f_back
    return found


def frames(frame: FrameType | None) -> set[FrameType]:
    """A frame and those outside of it."""
    found = set()
    while frame is not None:
        found.add(frame)
        frame = frame.f_back
    return found


@functools.cache
def _lines(file: str, first: int, line: int, names: tuple[str, ...]) -> list[int]:
    """Where what catches errors of one of these names begins, around a line of a function that begins at `first`."""
    tree = rank_syntax.tree(file)
    around = (
        []
        if tree is None
        else [n for n in ast.walk(tree) if isinstance(n, (ast.Try, ast.With)) and n.lineno >= first and _covers(n.body, line)]
    )
    return [node.lineno for node in around if _catches(node, names)]


def _catches(node: ast.Try | ast.With, names: tuple[str, ...]) -> bool:
    if isinstance(node, ast.With):
        return any(_swallows(item.context_expr) for item in node.items)
    return any(_named(handler.type, names) and not _raises(handler) for handler in node.handlers)


def _covers(body: list[ast.stmt], line: int) -> bool:
    return body[0].lineno <= line <= (body[-1].end_lineno or 0)


def _named(caught: ast.expr | None, names: tuple[str, ...]) -> bool:
    """Whether `except caught:` is for an error of these names.."""
    if caught is None:
        return True
    each: list[Any] = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(_last_name(x) in names for x in each)


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _raises(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.body[-1], ast.Raise)


def _swallows(manager: ast.expr) -> bool:
    """Of one that was made before (`with self:` in unittest's `assertRaises(error, function)`) nothing is known: it may."""
    return not isinstance(manager, ast.Call) or _last_name(manager.func) in _SWALLOW
