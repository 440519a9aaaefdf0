"""Where text or bytes that were made of a number become numbers again: `float(f"{loss:.3f}")`, `json.loads(text)["loss"]`, by name too."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torch_bridge.script import rank_syntax

_NUMBERS = {"int", "float", "complex", "eval", "literal_eval", "loads", "unpack", "unpack_from", "iter_unpack", "from_bytes", "memoryview"}
"""Functions that make numbers of text or bytes."""
_ARRAYS = {"frombuffer", "fromstring"}
"""Those that make arrays or tensors."""
_OF_TEXT = {"str", "format", "repr", "zfill", "join", "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "replace", "removeprefix", "removesuffix",
            "partition", "rpartition", "encode", "decode", "lower", "upper", "ljust", "rjust", "center", "bytes", "bytearray", "tobytes"}  # fmt: skip
_AROUND = (
    ast.JoinedStr, ast.FormattedValue, ast.BinOp, ast.List, ast.Tuple, ast.ListComp, ast.GeneratorExp, ast.comprehension, ast.Subscript, ast.Starred,
)  # fmt: skip
_ROUNDS = 3
"""Names that are followed one after another."""


def numbers_of(node: ast.AST) -> Iterator[ast.expr]:
    """The calls in the same function that make numbers of a text, which is this expression or made of it; of those that make tensors, what they are given."""
    yield from _numbers(node, set(), _ROUNDS)


def _numbers(node: ast.AST, done: set[str], rounds: int) -> Iterator[ast.expr]:
    inner: ast.AST = node
    for outer in rank_syntax.parents(node):
        if isinstance(outer, ast.Call):
            name = rank_syntax.last_name(outer.func)
            if inner in outer.args and name in _NUMBERS | _ARRAYS:
                yield outer if name in _NUMBERS or not isinstance(inner, ast.expr) else inner
                return
            if not is_text(outer):
                return
        elif isinstance(outer, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            if rounds:
                targets = outer.targets if isinstance(outer, ast.Assign) else [outer.target]
                names = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
                yield from _numbers_by_name(names - done, outer, done, rounds - 1)
            if not isinstance(outer, ast.NamedExpr):
                return
        elif not isinstance(outer, (*_AROUND, ast.Attribute)):
            return
        inner = outer


def _numbers_by_name(names: set[str], at: ast.AST, done: set[str], rounds: int) -> Iterator[ast.expr]:
    done |= names
    for other in ast.walk(rank_syntax.function_of(at)):
        if isinstance(other, ast.Name) and other.id in names and isinstance(other.ctx, ast.Load):
            yield from _numbers(other, done, rounds)


def is_text(node: ast.AST) -> bool:
    """`str(rank)`, `"{}".format(rank)`, `text.strip()`."""
    return isinstance(node, ast.Call) and rank_syntax.last_name(node.func) in _OF_TEXT


def formatting(node: ast.AST) -> ast.BinOp | None:
    """The `"%.3f" % number` that an expression is the number of, or one of them."""
    inner = node
    for outer in rank_syntax.parents(node):
        if isinstance(outer, ast.BinOp):
            texts = isinstance(outer.left, ast.JoinedStr) or (isinstance(outer.left, ast.Constant) and isinstance(outer.left.value, str))
            return outer if texts and isinstance(outer.op, ast.Mod) and outer.right is inner else None
        if not isinstance(outer, (ast.Tuple, ast.Dict)):
            return None
        inner = outer
    return None
