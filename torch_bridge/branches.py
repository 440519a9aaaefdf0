"""Python branches on a rank in a process that hosts several ranks: the first hosted rank decides for all.

Printing or logging on rank 0 is what such branches are for, and right. Tensor work inside one is not: on real workers only some ranks would do
it. So a branch is remembered when it is taken, and reported once when a graph is compiled that holds an op recorded inside it.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch_bridge import source


class Branch:
    """A statement that tested a rank: its file, the line of the test, and the lines that depend on it."""

    def __init__(self, file: str, line: int, body: range):
        self.file, self.line, self.body = file, line, body
        self.reported = False


_taken: dict[tuple[str, int], Branch] = {}


def note(values: Sequence[Any]) -> None:
    """A condition that differs by rank has been asked for its truth."""
    frame = sys._getframe(2)
    while frame is not None and not source.is_outside(frame.f_code):
        if frame.f_back is None:
            return
        frame = frame.f_back
    key = (frame.f_code.co_filename, frame.f_lineno)
    if key not in _taken:
        body = _dependent_lines(*key)
        if body is not None:
            _taken[key] = Branch(*key, body)


@functools.cache
def _tree(file: str) -> ast.AST | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None


def _dependent_lines(file: str, line: int) -> range | None:
    """The lines that the innermost `if`, `while` or conditional expression whose test covers a line decides about."""
    tree = _tree(file)
    if tree is None:
        return None
    found: range | None = None
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.While)) and node.test.lineno <= line <= (node.test.end_lineno or line):
            found = range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)
        elif isinstance(node, ast.IfExp) and node.test.lineno <= line <= (node.test.end_lineno or line) and _computes(node):
            found = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return found


def _computes(node: ast.IfExp) -> bool:
    """Whether a conditional expression chooses between computations, not just between names or constants."""
    return any(isinstance(n, (ast.Call, ast.BinOp, ast.Subscript)) for part in (node.body, node.orelse) for n in ast.walk(part))


def check(sources: Iterable[source.Source]) -> None:
    """Warn about branches that hold one of these ops; each is reported once."""
    waiting = [b for b in _taken.values() if not b.reported]
    if not waiting:
        return
    for at in sources:
        for branch in waiting:
            if not branch.reported and at.file == branch.file and at.line in branch.body:
                branch.reported = True
                warnings.warn(
                    f"{branch.file}:{branch.line} branches on a rank, and line {at.line} inside the branch works with xla tensors. This process runs "
                    "the script once for several ranks, so the first rank's choice was taken for all of them. Use a mask "
                    "(torch.where(torch.zeros((), device='xla') + rank == 0, a, b)), or start one process per rank with torchrun.",
                    stacklevel=2,
                )
