"""Files whose names are made of a number that differs by rank: `torch.load(f"part-{rank}.pt")`.

Text has no room for all ranks' numbers: it gets the first hosted rank's. That is right for what is printed, logged or written. A script that reads such a file
reads rank 0's for all ranks, which is said once for a line. The name is looked for in the call that reads, and one assignment away from it. So is what looks
something up by such a text (`table[f"part{rank}"]`), or makes a number of it.
"""

from __future__ import annotations

import ast
import sys
from types import CodeType, FrameType

from torch_bridge.mesh import rank_numbers
from torch_bridge.script import rank_branches, rank_syntax, rank_texts

_READERS = {
    "load", "loadtxt", "genfromtxt", "fromfile", "memmap", "load_file", "safe_open", "read_csv", "read_json", "read_parquet", "read_table", "read_image",
    "read_text", "read_bytes", "read_file", "load_dataset", "load_from_disk", "open",
}  # fmt: skip
_seen: set[tuple[str, CodeType, int]] = set()


def note() -> None:
    """A number that differs by rank became text."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == rank_numbers.__file__:
        frame = frame.f_back
    if frame is None:
        return
    place = (frame.f_code.co_filename, frame.f_code, frame.f_lasti)  # code of equal functions in different files is equal
    if place in _seen:
        return
    _seen.add(place)
    if not rank_syntax.is_script(frame.f_code):
        return
    node = rank_syntax.asking(frame)
    reads = None if node is None else _reader(node)
    if reads is not None:
        rank_numbers.report(
            f"{frame.f_code.co_filename}:{frame.f_lineno} makes a name of a number that differs by rank, and line {reads.lineno} reads a file by it "
            f"({ast.unparse(reads.func)}). This process runs the script once for several ranks: all ranks get what is in rank 0's file. "
            f"{_instead(reads)}, or start one process per rank with torchrun.",
            4,
        )
        return
    if node is not None:
        rank_branches.note_text(frame, node)
    looks = None if node is None else _look_up(node)
    if looks is not None:
        rank_numbers.report(
            f"{frame.f_code.co_filename}:{frame.f_lineno} makes text of a number that differs by rank, and line {looks.lineno} looks something up by it "
            f"({ast.unparse(looks)}). This process runs the script once for several ranks: all ranks get what is rank 0's. Use a tensor for what ranks differ "
            "in (torch.stack([...])[rank]), or start one process per rank with torchrun.",
            4,
        )


def _instead(reads: ast.Call) -> str:
    """What gives each rank what is in its own file: `each_rank` takes the tensors of a checkpoint together, also those of `XlaFullyShardedDataParallel`."""
    what = ast.unparse(reads.func)
    if what == "torch.load" or what.rpartition(".")[2] == "load_file":
        return f"Let every rank have its own: torch_bridge.each_rank(lambda rank: {what}(path_of(rank)), xm.get_ordinal())"
    return "Read all ranks' files into one tensor and take this rank's part (torch.stack([...])[rank])"


_TEXT = (ast.JoinedStr, ast.FormattedValue, ast.BinOp)


def _look_up(node: ast.expr) -> ast.expr | None:
    """What takes something by this text: `table[f"part{rank}"]`, `table.get(str(rank))`, `getattr(module, f"layer{rank}")`, by name too."""
    inner: ast.AST = node
    for outer in rank_syntax.parents(node):
        if isinstance(outer, (ast.Subscript, ast.Call)) and _by(outer, inner):
            return outer
        if isinstance(outer, ast.Assign):
            names = {t.id for t in outer.targets if isinstance(t, ast.Name)}
            uses = (n for n in ast.walk(rank_syntax.function_of(outer)) if isinstance(n, ast.Name) and n.id in names)
            found = ((rank_syntax.parents(n), n) for n in uses)
            return next((p for ps, n in found if isinstance(p := next(ps), (ast.Subscript, ast.Call)) and _by(p, n)), None)
        if not isinstance(outer, _TEXT) and not rank_texts.is_text(outer):
            return None
        inner = outer
    return None


def _by(look: ast.Subscript | ast.Call, text: ast.AST) -> bool:
    """Whether a subscript, or a call, takes something by a text."""
    if isinstance(look, ast.Subscript):
        return isinstance(look.ctx, ast.Load) and look.slice is text
    if isinstance(look.func, ast.Name):
        return look.func.id == "getattr" and len(look.args) > 1 and look.args[1] is text
    return isinstance(look.func, ast.Attribute) and look.func.attr in ("get", "pop", "get_submodule") and look.args[:1] == [text]


def _reader(node: ast.expr) -> ast.Call | None:
    """The call that reads a file by a name that holds this text."""
    for outer in rank_syntax.parents(node):
        if isinstance(outer, ast.Call) and _reads(outer):
            return outer
        if isinstance(outer, ast.Assign):
            names = {t.id for t in outer.targets if isinstance(t, ast.Name)}
            calls = (c for c in ast.walk(rank_syntax.function_of(outer)) if isinstance(c, ast.Call) and _reads(c))
            return next((c for c in calls if any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(c))), None)
        if isinstance(outer, ast.stmt):
            return None
    return None


def _reads(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name != "open":
        return name in _READERS
    modes = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "mode")]
    return not any(isinstance(m, ast.Constant) and set(str(m.value)) & set("wax+") for m in modes) and isinstance(call.func, ast.Name)
