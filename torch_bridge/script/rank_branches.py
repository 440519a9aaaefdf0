"""Plain numbers and truths that Python takes from a number that differs by rank, in a process that hosts several: the first hosted rank's, for all.

`if rank == 0: print(...)` is what that is for, and right. What meets tensors is not: a branch with tensor work inside, `x * float(rank)`, a scale that
`2.0 if rank else 1.0` chose, and neither is what ranks tell each other (`xm.mesh_reduce("loss", float(loss), max)`). So each place is followed through the
script's source (`rank_flow`) when it is first passed, and reported once: at once where it is seen to meet tensors or to go to other ranks, else when a graph
is compiled that holds an op of a line that works with it.
"""

from __future__ import annotations

import ast
import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

from torch_bridge import source
from torch_bridge.mesh import rank_numbers
from torch_bridge.script import rank_flow, rank_syntax, rank_texts


class Branch:
    """A place that took a plain number or a truth. decided: what depends on it; lines: (file, line) that do; mixed: those where tensors surely meet it."""

    def __init__(self, frame: FrameType, decided: ast.AST, flow: rank_flow.Flow):
        self.file, self.line, self.decided = frame.f_code.co_filename, frame.f_lineno, decided
        self.lines, self.mixed = flow.lines, flow.mixed
        self.reported = False


_taken: dict[Any, Branch | None] = {}
_busy = False


@contextlib.contextmanager
def _following() -> Iterator[None]:
    """Following the source asks no number."""
    global _busy
    _busy = True
    try:
        yield
    finally:
        _busy = False


def note(values: Sequence[Any], truth: bool = True) -> None:
    """A number that differs by rank has been asked for its truth, or for a plain number."""
    _note_at(_asker(), truth)


def note_made(frame: FrameType | None, node: ast.expr | None = None, sure: bool = False) -> None:
    """Something plain has been made of a number that differs by rank: a table of pandas, an array of Python's. node: the expression, None for what asks.
    sure: only what surely meets tensors is said."""
    while frame is not None and not rank_syntax.is_script(frame.f_code):
        frame = frame.f_back
    _note_at(frame, False, node, sure)


def note_bytes() -> None:
    """The script itself asks for bytes of a number or an array that differs by rank, or pickles it. What libraries do with bytes is theirs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.endswith(_OF_NUMBERS):
        frame = frame.f_back
    if frame is not None and rank_syntax.is_script(frame.f_code):
        note_text(frame)


def note_text(frame: FrameType | None, node: ast.expr | None = None) -> None:
    """Text or bytes have been made of a number that differs by rank: numbers that are made of them again are followed to where they surely meet tensors.
    node: the text, None for what asks."""
    while frame is not None and not rank_syntax.is_script(frame.f_code):
        frame = frame.f_back
    node = rank_syntax.asking(frame) if node is None and frame is not None else node
    while frame is not None and frame.f_code.co_name in _PARTS and frame.f_back is not None:
        frame = frame.f_back  # whose names the numbers meet
    for number in () if node is None or _busy else rank_texts.numbers_of(node):
        _note_at(frame, False, number, sure=True)


_PARTS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


def _note_at(frame: FrameType | None, truth: bool, node: ast.expr | None = None, sure: bool = False) -> None:
    """sure: lines that use it, in a call or a text, say nothing; what meets tensors does."""
    if frame is None or _busy or not source.is_outside(frame.f_code):
        return  # torch and this package know what to do with the answer
    place = (*_place(frame), node) if sure else _place(frame)
    if place in _taken:
        return
    with _following():
        found = _follow(frame, truth, node, sure)
    _taken[place] = found
    if found is None and not truth:
        note_text(frame, node)  # if it is one: `"%.3f" % rank`
    if found is not None and found.mixed and not found.reported:
        _report(found, found.mixed[0][1], 4)


def _place(frame: FrameType) -> tuple[Any, ...]:
    """Code objects of equal functions in different files are equal."""
    return frame.f_code.co_filename, frame.f_code, frame.f_lasti


def _asker() -> FrameType | None:
    """The frame that asked: not one of the methods of our numbers and tensors that answer."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (
        frame.f_code.co_filename == rank_numbers.__file__
        or frame.f_code.co_filename.endswith(_OF_BUILTINS)
        or (frame.f_code.co_name in _ANSWERS and not source.is_outside(frame.f_code))
    ):
        frame = frame.f_back
    return frame


_OF_NUMBERS = (rank_numbers.__file__, os.path.join("torch_bridge", "recorder", "rank_array.py"))
_OF_BUILTINS = os.path.join("torch_bridge", "per_rank", "rank_math.py")
"""It stands between a script and Python's `max`, which compares tuples."""
_ANSWERS = {"__bool__", "__float__", "__int__", "__index__", "__hash__"}


def _follow(frame: FrameType, truth: bool, node: ast.expr | None, sure: bool) -> Branch | None:
    node = rank_syntax.asking(frame) if node is None else node
    if node is None:
        return None
    decided, is_branch = rank_syntax.decision(node) if truth else (node, False)
    if isinstance(decided, ast.Assert) or _is_string(decided):
        return None
    known = next((b for b in _taken.values() if b is not None and b.decided is decided), None)
    if known is not None:
        return known
    flow = rank_flow.Flow()
    flow.follow(frame, decided, is_branch)
    if sure:
        flow.lines.clear()
    return Branch(frame, decided, flow)


def _is_string(node: ast.AST) -> bool:
    """Whether a number becomes part of a text."""
    return isinstance(node, (ast.JoinedStr, ast.FormattedValue)) or (
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(node.left, (ast.Constant, ast.JoinedStr))
        and isinstance(getattr(node.left, "value", ""), str)
    )  # fmt: skip


def check(sources: Iterable[source.Source]) -> None:
    """Warn about places whose result one of these ops works with; each is reported once."""
    waiting = [b for b in _taken.values() if b is not None and not b.reported and b.lines]
    if not waiting:
        return
    for at in sources:
        for branch in waiting:
            if not branch.reported and (at.file, at.line) in branch.lines:
                _report(branch, at.line, 2)


def _report(found: Branch, line: int, level: int) -> None:
    found.reported = True
    if isinstance(found.decided, (ast.If, ast.While, ast.IfExp, ast.Match)):
        what = f"branches on a rank, and line {line} inside the branch, or after it with what it decided, works with tensors or yields data"
    else:
        what = f"takes {ast.unparse(found.decided)} from a number that differs by rank, and line {line} works with it and tensors, or gives it to other ranks"
    rank_numbers.report(
        f"{found.file}:{found.line} {what}. This process runs the script once for several ranks, and Python asks for one answer: the first rank's choice was "
        "taken for all of them. Use a mask (torch.where(torch.zeros((), device='xla') + rank == 0, a, b)), keep the rank of a dataset in an attribute "
        "(self.rank = xm.get_ordinal() in its __init__), "
        "write `loss.item()` for `float(loss)` and `rank * 1.0` for `float(rank)`, or start one process per rank with torchrun.",
        level + 1,
    )
