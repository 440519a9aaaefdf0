"""Files whose names are made of a number that differs by rank: `torch.load(f"part-{rank}.pt")`.

Text has no room for all ranks' numbers: it gets the first hosted rank's. That is right for what is printed, logged or written. A script that reads such a file
reads rank 0's for all ranks, which is said once for a line. The name is looked for in the call that reads, and one assignment away from it.
"""

from __future__ import annotations

import ast
import sys
from types import CodeType, FrameType

from torch_bridge.mesh import rank_numbers
from torch_bridge.script import rank_syntax

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
            f"({ast.unparse(reads.func)}). This process runs the script once for several ranks: all ranks get what is in rank 0's file. Read all ranks' files "
            "into one tensor and take this rank's part (torch.stack([...])[rank]), or start one process per rank with torchrun.",
            4,
        )


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
