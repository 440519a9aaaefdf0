"""A Python function with its reads, writes and calls routed through probes: the same statements, rewritten on the abstract syntax tree.

`instrumented(function)` gives a function that computes what the original computes. Where the original reads an attribute, an item or an element of something,
calls, writes, or uses an operator, the new one asks `PROBES`, which do the same and tell the thread's `Observer`. Names, comparisons of identity, control flow
and exceptions stay native. A function whose source is not to be found, or is not what it was compiled from, or has statements that are not routed (`nonlocal`,
`match`, `async`), raises `CannotInstrument`.
"""

from __future__ import annotations

import ast
import copy
import dis
import types

from torch_bridge.guards.function_source import class_name, compiled, node_of
from torch_bridge.guards.routing import PROBES_NAME, CannotInstrument, Router, refuse_unrouted


class Code:
    """The rewritten code of a function. names: globals that the original names, also in functions that it defines."""

    __slots__ = ("code", "names")

    def __init__(self, code: types.CodeType, names: tuple[str, ...]):
        self.code = code
        self.names = names


_CODES: dict[types.CodeType, Code | str] = {}
ROUTED: set[types.CodeType] = set()
"""All rewritten code objects, with those of the functions and comprehensions inside."""


def code_of(function: types.FunctionType) -> Code:
    """The rewritten code of a function, made once. Raises CannotInstrument."""
    found = _CODES.get(function.__code__)
    if found is None:
        try:
            found = _rewritten(function)
        except CannotInstrument as error:
            found = str(error)
        _CODES[function.__code__] = found
    if isinstance(found, str):
        raise CannotInstrument(found)
    return found


def instrumented(function: types.FunctionType, probes: types.CellType) -> types.FunctionType:
    """The function with its code rewritten: the same globals, cells, defaults and attributes. probes: a cell with the probes. Raises CannotInstrument."""
    code = code_of(function).code
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells[PROBES_NAME] = probes
    new = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, tuple(cells[name] for name in code.co_freevars)
    )
    new.__kwdefaults__ = function.__kwdefaults__
    new.__qualname__ = function.__qualname__
    new.__dict__.update(function.__dict__)
    return new


def _rewritten(function: types.FunctionType) -> Code:
    code = function.__code__
    where = f"{code.co_qualname}"
    node, plain = node_of(code, function.__globals__)
    refuse_unrouted(node, where)
    new = copy.deepcopy(node) if isinstance(node, ast.Lambda) else node
    package = function.__globals__.get("__package__") or ""
    made = Router(package, class_name(code)).function(new)
    found = _named_alike(compiled(made, code), code.co_qualname)
    _add_routed(found)
    return Code(found, tuple(dict.fromkeys(_global_names(plain))))


def _named_alike(made: types.CodeType, name: str) -> types.CodeType:
    """The code with the qualified name of the original (error messages show it), also of the functions inside."""
    inner = tuple(
        _named_alike(c, name + c.co_qualname.removeprefix(made.co_qualname)) if isinstance(c, types.CodeType) else c for c in made.co_consts
    )
    return made.replace(co_qualname=name, co_consts=inner)


def _add_routed(code: types.CodeType) -> None:
    ROUTED.add(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _add_routed(constant)


def _global_names(code: types.CodeType) -> list[str]:
    """Names that the code, or code inside of it, loads as globals or builtins."""
    names = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _global_names(constant)
    return names
