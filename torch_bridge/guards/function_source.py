"""The source of a function: its node in the abstract syntax tree, if that compiles to the very code that the function has."""

from __future__ import annotations

import ast
import bisect
import copy
import dis
import functools
import linecache
import types
from operator import attrgetter
from typing import Any

from torch_bridge.guards.routing import PROBES_NAME, CannotInstrument, bare

_FLAGS = 0x1FE0000
"""Bits of `co_flags` that come from `from __future__ import`."""


def class_name(code: types.CodeType) -> str:
    """The class whose body the function stands in, for private names."""
    parts = code.co_qualname.split(".")
    return parts[-2] if len(parts) > 1 and parts[-2] != "<locals>" else ""


def _candidates(code: types.CodeType, lines: list[str]) -> list[Any]:
    """Functions of that name that begin in the same line."""
    if code.co_name == "<lambda>":
        return _lambdas("".join(lines)).get(code.co_firstlineno, [])
    first, last = code.co_firstlineno, _last_line(code)
    indented = lines[first - 1][:1].isspace()
    for end in range(last, min(last + _TAIL, len(lines)) + 1):  # a closing bracket has no instruction
        try:
            tree = ast.parse(("if 1:\n" if indented else "") + "".join(lines[first - 1 : end]))
        except SyntaxError:
            continue
        ast.increment_lineno(tree, first - 1 - indented)
        return [node for node in (tree.body[0].body if indented else tree.body) if getattr(node, "name", "") == code.co_name]  # type: ignore[attr-defined]
    return []


_TAIL = 60


def _last_line(code: types.CodeType) -> int:
    inner = [_last_line(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return max([code.co_firstlineno, *inner, *(line for *_, line in code.co_lines() if line is not None)])


@functools.lru_cache(maxsize=64)
def _lambdas(text: str) -> dict[int, list[ast.AST]]:
    found: dict[int, list[ast.AST]] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Lambda):
            found.setdefault(node.lineno, []).append(node)
    return found


def node_of(code: types.CodeType, space: dict[str, Any]) -> tuple[Any, types.CodeType]:
    """The function's node in its source, and what that compiles to: the very code."""
    frozen = code.co_filename.startswith("<frozen")  # a part of Python's library that is compiled into the interpreter
    lines = linecache.getlines(space.get("__file__") or "" if frozen else code.co_filename, space)
    if not lines:
        raise CannotInstrument(f"the source of {code.co_qualname} is not known")
    try:
        candidates = _candidates(code, lines)
    except (SyntaxError, IndexError):
        candidates = []
    for node in candidates:
        for imports in ((), _imported(code, space)):
            try:
                plain = compiled(node, code, imports)
            except (SyntaxError, CannotInstrument):
                continue
            if _same(plain, code):
                return node, plain
    raise CannotInstrument(f"the source of {code.co_qualname} ({code.co_filename}:{code.co_firstlineno}) is not what it was compiled from")


def _same(a: types.CodeType, b: types.CodeType) -> bool:
    """Whether two code objects do the same. (A method of an imported module is called by other instructions where the import is in sight.)"""
    shape = attrgetter("co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount", "co_posonlyargcount")
    if shape(a) != shape(b):
        return False
    x, y = _instructions(a), _instructions(b)
    return len(x) == len(y) and all(m[0] == n[0] and _same_constant(m[1], n[1]) for m, n in zip(x, y, strict=True))


def _instructions(code: types.CodeType) -> list[tuple[str, Any]]:
    """Its instructions with what they are about; jumps by the number of the instruction that they go to."""
    found = [i for i in dis.get_instructions(code) if i.opname not in _LEFT_OUT]
    at: dict[int, int] = {}
    for k, i in enumerate(found):
        at[i.offset] = k
    offsets = sorted(at)
    jumps = {*dis.hasjrel, *dis.hasjabs}
    return [
        (_CALLED_ALIKE.get(i.opname, i.opname), bisect.bisect_left(offsets, i.argval) if i.opcode in jumps else i.argval) for i in found
    ]


_LEFT_OUT = ("EXTENDED_ARG", "PUSH_NULL", "CACHE", "NOP")
_CALLED_ALIKE = {"LOAD_METHOD": "LOAD_ATTR"}


def _same_constant(a: object, b: object) -> bool:
    if isinstance(a, types.CodeType) and isinstance(b, types.CodeType):
        return _same(a, b)
    return type(a) is type(b) and repr(a) == repr(b)


def _imported(code: types.CodeType, space: dict[str, Any]) -> tuple[str, ...]:
    """Globals that the code names and that seem to have been imported: where the compiler saw that, it makes other instructions for calls."""
    found = ((name, space.get(name)) for name in code.co_names)
    home = space.get("__name__")
    return tuple(name for name, x in found if isinstance(x, types.ModuleType) or getattr(x, "__module__", home) != home)


def compiled(node: ast.FunctionDef | ast.AsyncFunctionDef, of: types.CodeType, imports: tuple[str, ...] = ()) -> types.CodeType:
    """The code of a function's node, compiled with the free variables that the original has. imports: globals that the module imports."""
    free = [PROBES_NAME, *of.co_freevars]
    inner = node
    if not isinstance(node, ast.Lambda):
        inner = copy.copy(node)
        inner.decorator_list = []
        inner.returns = None
    inner = copy.copy(inner)
    inner.args = bare(node.args)
    body: list[ast.stmt] = [inner, ast.Pass()] if not isinstance(inner, ast.Lambda) else [ast.Expr(inner)]
    if not isinstance(inner, ast.Lambda) and inner.name not in free:
        body.insert(0, ast.Global([inner.name]))  # else a function that calls itself would find it in a cell
    factory = ast.FunctionDef(
        name="__factory__",
        args=ast.arguments(posonlyargs=[], args=[ast.arg(name) for name in free], kwonlyargs=[], kw_defaults=[], defaults=[]),
        body=body,
        decorator_list=[],
    )
    if "type_params" in ast.FunctionDef._fields:
        factory.type_params = []  # type: ignore[attr-defined]
    if class_name(of):
        outer: ast.stmt = ast.ClassDef(name=class_name(of), bases=[], keywords=[], body=[factory], decorator_list=[])
        if "type_params" in ast.ClassDef._fields:
            outer.type_params = []  # type: ignore[attr-defined]
    else:
        outer = factory
    above: list[ast.stmt] = [ast.Import([ast.alias("_", name)]) for name in imports]
    module = ast.fix_missing_locations(ast.Module([*above, outer], type_ignores=[]))
    made = compile(module, of.co_filename, "exec", flags=of.co_flags & _FLAGS, dont_inherit=True)
    return _find(made, of)


def _find(made: types.CodeType, of: types.CodeType) -> types.CodeType:
    for constant in made.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_name == "__factory__":
                return next(c for c in constant.co_consts if isinstance(c, types.CodeType) and c.co_name == of.co_name)
            try:
                return _find(constant, of)
            except StopIteration:
                continue
    raise StopIteration
