"""Which user line, in which module, an op comes from.

Called only for ops that were not predicted from an earlier step (see `segment`), so it may walk the Python stack.
"""

from __future__ import annotations

import os
import re
import sys
import weakref
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import NamedTuple

import torch
import typing_extensions

_DEPRECATED: CodeType = typing_extensions.deprecated.__call__.__code__
"""What torch's deprecated functions are wrapped with, some collectives among them."""
_BASE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep, "<frozen", _DEPRECATED.co_filename)
_LIBRARIES: tuple[str, ...] = _BASE
_MODULE_FRAMES = {torch.nn.Module._call_impl.__code__}
_ENGINE = torch.autograd.graph._engine_run_backward.__code__


class Source(NamedTuple):
    """Where an op was called: dotted module path ('' outside modules), module class, file, line and function.

    backward: autograd called it; the rest is then that of its forward op. training: the mode of the module (True outside modules).
    """

    module: str = ""
    module_class: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    backward: bool = False
    training: bool = True

    @property
    def where(self) -> str:
        """'file.py:12', '' if no line is known: what metadata of HLO and everything that is shown call the place."""
        return f"{base_name(self.file)}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line} in {self.function}" if self.file else "(no Python line: a backward op)"
        return f"{where} [{self.module}]" if self.module else where


NOWHERE = Source()
_IS_USER: dict[CodeType, bool] = {}


def add_library(folder: str) -> None:
    """Code in this folder is no user's: an op that it calls counts as called by whoever called it."""
    global _LIBRARIES
    _LIBRARIES = (*_LIBRARIES, folder + os.sep)
    _IS_USER.clear()


def add_module_frame(code: CodeType) -> None:
    """Frames of this code are calls of a module, the local variable `self`."""
    _MODULE_FRAMES.add(code)


def is_outside(code: CodeType) -> bool:
    """True for code outside torch and this package, whoever's it is."""
    return is_user(code) or not (code.co_filename.startswith(_BASE) or "/contextlib.py" in code.co_filename)


def is_user(code: CodeType) -> bool:
    """True for code outside torch, this package, and what `add_library` was told."""
    known = _IS_USER.get(code)
    if known is None:
        name = code.co_filename
        known = _IS_USER[code] = not (name.startswith(_LIBRARIES) or "/contextlib.py" in name)
    return known


def user_line(depth: int = 1) -> str:
    """'file:line in function' of the nearest frame outside torch and this package, for error messages."""
    return str(current(depth + 1, modules=False))


def short_line() -> str:
    """'file.py:12' of the nearest frame outside torch and this package, '' if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user(frame.f_code):
        frame = frame.f_back
    return "" if frame is None else f"{base_name(frame.f_code.co_filename)}:{frame.f_lineno}"


def script_line(*but: object) -> str:
    """'file.py:12' of the nearest frame of the script's own, no library's (of a library if there is none), '' without any. but: objects whose methods are not
    meant."""
    frame: FrameType | None = sys._getframe(1)
    nearest = ""
    while frame is not None:
        if is_user(frame.f_code) and not any(frame.f_locals.get("self") is x for x in but):
            line = f"{base_name(frame.f_code.co_filename)}:{frame.f_lineno}"
            if not _INSTALLED.search(frame.f_code.co_filename):
                return line
            nearest = nearest or line
        frame = frame.f_back
    return nearest


_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


def current(depth: int = 1, modules: bool = True) -> Source:
    """The source of the op being recorded."""
    backward = modules and torch._C._current_autograd_node() is not None
    user, stack = _walk(sys._getframe(depth), modules, backward)
    if backward and not stack:
        forward = backward_of()
        if forward is not None:
            return forward._replace(backward=True)
        user, stack = _walk(sys._getframe(depth), modules, False)
    path, cls = _module_path(stack, backward) if stack else ("", "")
    training = stack[0].training if stack else True
    if user is None:
        return Source(path, cls, backward=backward, training=training)
    return Source(path, cls, user.f_code.co_filename, user.f_lineno, user.f_code.co_name, backward, training)


def of_error(depth: int = 1) -> Source:
    """As `current`, but a line of the user's that runs within a backward pass (a backward of their own, a hook) goes before that of the forward op."""
    if torch._C._current_autograd_node() is not None:
        user, _ = _walk(sys._getframe(depth), False, True)
        if user is not None:
            return Source(file=user.f_code.co_filename, line=user.f_lineno, function=user.f_code.co_name)
    return current(depth + 1)


def _walk(start: FrameType, modules: bool, within_backward: bool) -> tuple[FrameType | None, list[torch.nn.Module]]:
    """The nearest frame of the user's, and the modules being called, innermost first.

    within_backward: of what autograd called alone: there are modules if a checkpoint recomputes its activations.
    """
    frame: FrameType | None = start
    user: FrameType | None = None
    stack: list[torch.nn.Module] = []
    while frame is not None:
        code = frame.f_code
        if within_backward and code is _ENGINE:
            break
        if user is None and is_user(code):
            user = frame
        if modules and code in _MODULE_FRAMES:
            owner = frame.f_locals.get("self")
            if isinstance(owner, torch.nn.Module):
                stack.append(owner)
        frame = frame.f_back
    return user, stack


_PATHS: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()


def _module_path(stack: list[torch.nn.Module], recomputing: bool = False) -> tuple[str, str]:
    """Dotted path of the innermost module below the outermost one on the stack; of one that is being recomputed, below the model that it belongs to."""
    root, leaf = stack[-1], stack[0]
    cls = type(leaf).__name__
    if recomputing:
        known = max((names.get(id(leaf), "") for names in _PATHS.values()), key=len, default="")
        if known:
            return known, cls
    names = _PATHS.get(root)
    if names is None or id(leaf) not in names:
        names = _PATHS[root] = {id(m): n for n, m in root.named_modules(remove_duplicate=False)}
    return names.get(id(leaf), cls), cls


def modes() -> list[dict[str, bool]]:
    """For each module that was called from outside others: whether it and those inside it are in training mode, by path (its own is its class)."""
    return [{n or type(root).__name__: m.training for n, m in root.named_modules()} for root in list(_PATHS)]


def base_name(file: str) -> str:
    """A file's name without folders; of a cell in a notebook "In[3]", as it is numbered there."""
    if "ipykernel_" in file:
        try:
            from IPython import get_ipython

            number = get_ipython().compile._filename_map.get(file)
            if number is not None:
                return f"In[{number}]"
        except (ImportError, AttributeError):
            pass
    return os.path.basename(file)


_FORWARD_SOURCES: dict[int, Source | tuple[Sequence[Source], int]] = {}
_KEEP = 200_000


def note_forward(source: Source) -> None:
    """Remember where the autograd node of the op being recorded came from (autograd made it just before the op)."""
    sequence = torch._C._autograd._get_sequence_nr() - 1
    if sequence not in _FORWARD_SOURCES:
        if len(_FORWARD_SOURCES) > _KEEP:
            _FORWARD_SOURCES.clear()
        _FORWARD_SOURCES[sequence] = source


def note_predicted(sources: Sequence[Source], at: int) -> None:
    """The same for an op that an earlier step predicted: its source is `sources[at]`."""
    sequence = torch._C._autograd._get_sequence_nr() - 1
    if sequence not in _FORWARD_SOURCES:
        if len(_FORWARD_SOURCES) > _KEEP:
            _FORWARD_SOURCES.clear()
        _FORWARD_SOURCES[sequence] = sources, at


def backward_of() -> Source | None:
    """While autograd runs a node: the source of its forward op."""
    node = torch._C._current_autograd_node()
    found = None if node is None else _FORWARD_SOURCES.get(node._sequence_nr())
    if found is None or isinstance(found, Source):
        return found
    sources, at = found
    return sources[at] if at < len(sources) else None
