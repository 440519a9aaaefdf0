"""Which user line, in which module, an op comes from.

Called only for ops that were not predicted from an earlier step (see `segment`), so it may walk the Python stack.
"""

from __future__ import annotations

import os
import sys
import weakref
from types import CodeType, FrameType
from typing import NamedTuple

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(__file__) + os.sep
_CALL_IMPL = torch.nn.Module._call_impl.__code__


class Source(NamedTuple):
    """Where an op was called: dotted module path ('' outside modules), module class, file, line and function."""

    module: str = ""
    module_class: str = ""
    file: str = ""
    line: int = 0
    function: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line} in {self.function}" if self.file else "(no Python line: a backward op)"
        return f"{where} [{self.module}]" if self.module else where


NOWHERE = Source()
_IS_USER: dict[CodeType, bool] = {}


def is_user(code: CodeType) -> bool:
    """True for code outside torch and this package."""
    known = _IS_USER.get(code)
    if known is None:
        name = code.co_filename
        known = _IS_USER[code] = not (name.startswith((_TORCH, _OURS, "<frozen")) or "/contextlib.py" in name)
    return known


def user_line(depth: int = 1) -> str:
    """'file:line in function' of the nearest frame outside torch and this package, for error messages."""
    return str(current(depth + 1, modules=False))


def current(depth: int = 1, modules: bool = True) -> Source:
    """The source of the op being recorded."""
    if modules and torch._C._current_autograd_node() is not None:
        forward = backward_of()
        if forward is not None:
            return forward
    frame: FrameType | None = sys._getframe(depth)
    user: FrameType | None = None
    stack: list[torch.nn.Module] = []
    while frame is not None:
        code = frame.f_code
        if user is None and is_user(code):
            user = frame
        if modules and code is _CALL_IMPL:
            owner = frame.f_locals.get("self")
            if isinstance(owner, torch.nn.Module):
                stack.append(owner)
        frame = frame.f_back
    path, cls = _module_path(stack) if stack else ("", "")
    if user is None:
        return Source(path, cls)
    return Source(path, cls, user.f_code.co_filename, user.f_lineno, user.f_code.co_name)


_PATHS: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()


def _module_path(stack: list[torch.nn.Module]) -> tuple[str, str]:
    """Dotted path of the innermost module below the outermost one on the stack."""
    root, leaf = stack[-1], stack[0]
    names = _PATHS.get(root)
    if names is None or id(leaf) not in names:
        names = _PATHS[root] = {id(m): n for n, m in root.named_modules(remove_duplicate=False)}
    return names.get(id(leaf), type(leaf).__name__), type(leaf).__name__


_FORWARD_SOURCES: dict[int, Source] = {}
_KEEP = 200_000


def note_forward(source: Source) -> None:
    """Remember where the autograd node of the op being recorded came from (autograd made it just before the op)."""
    sequence = torch._C._autograd._get_sequence_nr() - 1
    if sequence not in _FORWARD_SOURCES:
        if len(_FORWARD_SOURCES) > _KEEP:
            _FORWARD_SOURCES.clear()
        _FORWARD_SOURCES[sequence] = source


def backward_of() -> Source | None:
    """While autograd runs a node: the source of its forward op."""
    node = torch._C._current_autograd_node()
    if node is None:
        return None
    return _FORWARD_SOURCES.get(node._sequence_nr())
