"""The source of a script: which expression a frame is at, what an asked truth decides, and what names mean there."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import site
import sysconfig
import types
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from torch_bridge import source

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module


@functools.cache
def tree(file: str) -> ast.Module | None:
    """A file's syntax tree; each node knows its `parent`."""
    try:
        found = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None
    for node in ast.walk(found):
        for child in ast.iter_child_nodes(node):
            child.parent = node  # type: ignore[attr-defined]
    return found


def parents(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes around a node, innermost first."""
    while (found := getattr(node, "parent", None)) is not None:
        yield found
        node = found


def asking(frame: FrameType) -> ast.expr | None:
    """The innermost expression that a frame is at."""
    line, end, column, end_column = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    found = tree(frame.f_code.co_filename)
    if found is None or line is None or end is None or column is None or end_column is None:
        return None
    best: ast.AST | None = None
    for node in ast.walk(found):  # goes from the outside to the inside
        if isinstance(node, (ast.expr, ast.If, ast.While, ast.Assert)) and _covers(node, (line, column), (end, end_column)):
            best = node
    return best.test if isinstance(best, (ast.If, ast.While, ast.Assert)) else best  # type: ignore[return-value]


def _covers(node: Any, start: tuple[int, int], end: tuple[int, int]) -> bool:
    return (node.lineno, node.col_offset) <= start and (node.end_lineno, node.end_col_offset) >= end


def decision(node: ast.expr) -> tuple[ast.AST, bool]:
    """What an asked truth decides: the expression whose value depends on it, or the statement (then True) that branches on it."""
    inner: ast.AST = node
    for outer in parents(node):
        if isinstance(outer, (ast.If, ast.While)):
            return (outer, True) if inner is outer.test else (inner, False)
        if isinstance(outer, ast.Match):
            return outer, True
        if isinstance(outer, ast.IfExp):
            return (outer, False) if inner is outer.test else (inner, False)
        if isinstance(outer, ast.Assert):
            return outer, True
        if isinstance(outer, ast.comprehension):
            return outer.parent, False  # type: ignore[attr-defined]
        if not isinstance(outer, (ast.BoolOp, ast.UnaryOp, ast.Compare, ast.pattern, ast.match_case)):
            return inner, False
        inner = outer
    return inner, False


def ways(node: ast.If | ast.While | ast.Match) -> list[list[ast.stmt]]:
    """The blocks of which a branch takes one."""
    return [case.body for case in node.cases] if isinstance(node, ast.Match) else [node.body, node.orelse]


def decided(node: ast.If | ast.While | ast.Match) -> list[ast.stmt]:
    """The statements of all of them."""
    return [statement for way in ways(node) for statement in way]


def last_name(node: ast.expr) -> str:
    """The last part of a name: that of `islice` and of `itertools.islice`; "" for what has none."""
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def function_of(node: ast.AST) -> Function:
    """The function around a node, or its module."""
    return next(x for x in parents(node) if isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)))


@functools.cache
def _libraries() -> tuple[str, ...]:
    paths = [sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple({p + "/" for p in (*paths, *site.getsitepackages())})


def is_script(code: CodeType) -> bool:
    """Whether code belongs to the user: not to Python, an installed package, torch or this one."""
    return source.is_user(code) and not is_library(code.co_filename)


def is_library(file: str) -> bool:
    """Whether a file is Python's or an installed package's."""
    return file.startswith(_libraries())


def starts(node: ast.FunctionDef | ast.AsyncFunctionDef, code: CodeType) -> bool:
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return node.name == code.co_name and code.co_firstlineno in (first, node.lineno)


class Names:
    """What names mean in a frame."""

    def __init__(self, local: dict[str, Any], around: dict[str, Any]):
        self._local, self._global = local, around

    def value(self, node: ast.AST) -> Any:
        """Of a name, or attributes of one; None for anything else and what is not known yet."""
        if isinstance(node, ast.Name):
            if node.id in self._local:
                return self._local[node.id]
            builtins = self._global.get("__builtins__", {})
            builtins = builtins if isinstance(builtins, dict) else vars(builtins)
            return self._global.get(node.id, builtins.get(node.id))
        return _attribute(self.value(node.value), node.attr) if isinstance(node, ast.Attribute) else None


def _attribute(owner: Any, name: str) -> Any:
    """An attribute that is there, whatever its truth would be; None for what only code of the object's (`__getattr__`, a property) would give."""
    with contextlib.suppress(Exception):  # whatever a class or a lazy module does when it is asked
        if isinstance(owner, (types.ModuleType, type)):
            return getattr(owner, name, None)
        own = getattr(owner, "__dict__", {})
        members = (own, *(own.get(kind, {}) for kind in _MEMBERS)) if isinstance(owner, torch.nn.Module) else (own,)
        for held in members:
            if name in held:
                return held[name]
        return None if owner is None else getattr(type(owner), name, None)
    return None


_MEMBERS = ("_modules", "_parameters", "_buffers")
"""Where a module keeps what is assigned to it."""


def inside(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes of statements, functions that they define left out."""
    for statement in statements:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        yield statement
        yield from inside(ast.iter_child_nodes(statement))


def after(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements that follow one in the same block."""
    around = next(parents(node))
    for field in ("body", "orelse", "finalbody"):
        block = getattr(around, field, None)
        if isinstance(block, list) and node in block:
            yield from block[block.index(node) + 1 :]


def root_module(scope: Names, node: ast.AST) -> str | None:
    """The module whose attribute a function is, by its name in the script."""
    if isinstance(node, ast.Attribute):
        owner = scope.value(node.value)
        return owner.__name__ if isinstance(owner, types.ModuleType) else None
    return None
