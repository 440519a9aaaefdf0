"""Whether an argument is what a rank's number took out of a list, or only the same object: `Shard(files[rank])` and `Shard(files[0])` are given one string.

The source of the calls that are running tells: it is followed outward until one of them says how the object got its name.
"""

from __future__ import annotations

import ast
import functools
from types import CodeType, FrameType
from typing import Any

from torch_bridge import source
from torch_bridge.script import rank_indexing, rank_syntax
from torch_bridge.script.rank_indexing import Taken


def is_ranks(found: Taken, frame: FrameType | None) -> bool:
    """Whether the calls that are running, from this one outward, were given it as a rank's. True where their source does not tell (another thread's call)."""
    while frame is not None:
        answer = _told(found, frame) if source.is_outside(frame.f_code) else None
        if answer is not None:
            return answer
        frame = frame.f_back
    return True


def _told(found: Taken, frame: FrameType) -> bool | None:
    """What the call that this frame is in says; None if nothing."""
    call = _call(frame.f_code, frame.f_lasti)
    for argument in [] if call is None else [*call.args, *(k.value for k in call.keywords)]:
        if isinstance(argument, ast.Subscript):
            if _is_read(found, frame.f_code, argument):
                return True
            if _plain_element(argument, frame) is found.first:
                return False
        elif isinstance(argument, ast.Name) and rank_indexing._named(argument, frame) is found.first:
            return _bound(found, frame.f_code, argument.id)
    return None


@functools.lru_cache(maxsize=1024)
def _call(code: CodeType, at: int) -> ast.Call | None:
    """The call that this instruction is of."""
    where = list(code.co_positions())[at // 2]
    tree = rank_syntax.tree(code.co_filename)
    return (
        next((n for n in ast.walk(tree) if isinstance(n, ast.Call) and rank_indexing._position(n) == where), None)
        if tree is not None
        else None
    )


def _is_read(found: Taken, code: CodeType, node: ast.expr) -> bool:
    """Whether this expression has a rank's number take it."""
    inside = (n for n in ast.walk(node) if isinstance(n, ast.Subscript))
    return any((code.co_filename, rank_indexing._position(n)) in found.places for n in inside)


def _plain_element(node: ast.Subscript, frame: FrameType) -> Any:
    """`name[0]`, `name[k]`; None for anything else."""
    container = rank_indexing._named(node.value, frame)
    if type(container) not in (list, tuple, dict) or not isinstance(node.slice, (ast.Constant, ast.Name, ast.UnaryOp)):
        return None
    index = rank_indexing._named(node.slice, frame) if isinstance(node.slice, ast.Name) else ast.literal_eval(node.slice)
    try:
        return container[index] if isinstance(index, (int, str)) else None
    except LookupError:
        return None


def _bound(found: Taken, code: CodeType, name: str) -> bool | None:
    """Whether the function gives the name what a rank's number takes. None if it gives it nothing: a parameter, or a name from outside."""
    tree = rank_syntax.tree(code.co_filename)
    given: list[ast.expr] = []
    loops = False
    for node in ast.walk(tree) if tree is not None else ():
        if not code.co_firstlineno <= getattr(node, "lineno", 0) <= _last_line(code):
            continue
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            given += [node.value for t in targets if isinstance(t, ast.Name) and t.id == name]
        loops = loops or (
            isinstance(node, (ast.For, ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)) and name in _loop_names(node)
        )
    if any(_is_read(found, code, value) for value in given):
        return True
    return False if given or loops else None


def _last_line(code: CodeType) -> int:
    return max((line for *_, line in code.co_lines() if line is not None), default=code.co_firstlineno)


def _loop_names(node: Any) -> set[str]:
    targets = [node.target] if isinstance(node, ast.For) else [g.target for g in node.generators]
    return {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
