"""Branches of a script that are not taken, by names that have plain values: `if args.backend == "nccl": set_device(int(os.environ["LOCAL_RANK"]))`."""

from __future__ import annotations

import argparse
import ast
import operator
import sys
import types
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

import torch

from torch_bridge.script import rank_syntax

_PLAIN = (bool, int, float, str, type(None))
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


class _Unknown(Exception):
    """There is no telling what an expression gives, without running code of the script's."""


def taken(node: ast.AST, file: str) -> bool | None:
    """Whether an expression of a file stands in no branch but such as are taken, by what their tests say now. None where that is not known: where a test calls
    functions, or asks names of a function that does not run."""
    names = None
    inner, known = node, True
    for outer in rank_syntax.parents(node):
        if isinstance(outer, (ast.If, ast.IfExp)) and inner is not outer.test:
            names = _names(node, file) if names is None else names
            body = outer.body if isinstance(outer.body, list) else [outer.body]
            try:
                if bool(_value(outer.test, names)) != any(inner is part for part in body):
                    return False
            except (_Unknown, TypeError):
                known = False
        inner = outer
    return True if known else None


def _names(node: ast.AST, file: str) -> Mapping[str, Any]:
    """What the names around an expression stand for: of the function that it is in, if that runs, or else of the module."""
    function = next((p for p in rank_syntax.parents(node) if isinstance(p, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))), None)
    if function is None:
        return next((vars(m) for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get("__file__") == file), {})
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == file and _is_of(function, frame.f_code):
            return {**frame.f_globals, **frame.f_locals}
        frame = frame.f_back
    return {}


def _is_of(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, code: CodeType) -> bool:
    """Whether code is a function's of its file."""
    if isinstance(function, ast.Lambda):
        return (code.co_name, code.co_firstlineno) == ("<lambda>", function.lineno)
    return rank_syntax.starts(function, code)


def _value(test: ast.expr, names: Mapping[str, Any]) -> Any:
    """What a test gives. Raises _Unknown."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return not _value(test.operand, names)
    if isinstance(test, ast.BoolOp):
        return _joined(test, names)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in _COMPARED:
        return _COMPARED[type(test.ops[0])](_value(test.left, names), _value(test.comparators[0], names))
    if isinstance(test, ast.Call) and ast.unparse(test) == "torch.cuda.is_available()":
        return torch.cuda.is_available()
    found = _held(test, names)
    if type(found) not in _PLAIN:
        raise _Unknown
    return found


def _joined(test: ast.BoolOp, names: Mapping[str, Any]) -> bool:
    """`and` or `or`: one part that is known may decide."""
    decides, unknown = isinstance(test.op, ast.Or), False
    for part in test.values:
        try:
            if bool(_value(part, names)) == decides:
                return decides
        except _Unknown:
            unknown = True
    if unknown:
        raise _Unknown
    return not decides


def _held(test: ast.expr, names: Mapping[str, Any]) -> Any:
    """A constant, a name's object, or an attribute of parsed arguments, a simple namespace or a module.

    Numbers and flags of names that the file gives several values (`step > 100`, `if first:`), or of a module, are not known: they may be others when the
    script comes by.
    """
    if isinstance(test, ast.Constant):
        return test.value
    if isinstance(test, ast.Name) and test.id in names:
        return names[test.id] if _has_one_value(test) else _lasting(names[test.id])
    if isinstance(test, ast.Attribute):
        holder = _held(test.value, names)
        if type(holder) in (argparse.Namespace, types.SimpleNamespace) and test.attr in vars(holder):
            return vars(holder)[test.attr]
        if type(holder) is types.ModuleType and test.attr in vars(holder):
            return _lasting(vars(holder)[test.attr])
    raise _Unknown


def _has_one_value(name: ast.Name) -> bool:
    """Whether a file gives a name no value but where it is a parameter or imported, or one, and not in a loop."""
    *_, root = rank_syntax.parents(name)
    stores = [n for n in ast.walk(root) if isinstance(n, ast.Name) and n.id == name.id and not isinstance(n.ctx, ast.Load)]
    loops = (ast.For, ast.AsyncFor, ast.While, ast.comprehension)
    return not stores or (len(stores) == 1 and not any(isinstance(p, loops) for p in rank_syntax.parents(stores[0])))


def _lasting(found: Any) -> Any:
    """An object that a script gives no other value in passing. Raises _Unknown."""
    if type(found) in (bool, int, float):
        raise _Unknown
    return found
