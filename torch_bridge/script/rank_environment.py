"""`int(os.environ.get("RANK", 0))` in a process that runs the script once for several ranks: they have no environment of their own, and all get the default.

The script's source tells: its main file and the modules beside it are looked at when the process group is made, or the first number of a rank. What is compared
or printed alone (`if int(os.environ.get("RANK", 0)) == 0: print(...)`) is right, and so is what stands in a branch that is not taken (`known_branches`).
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator

from torch_bridge.mesh import rank_numbers, world
from torch_bridge.script import known_branches, rank_syntax

_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_WORDS = {
    "COMM", "CORE", "DATA", "DDP", "DEVICE", "DIST", "DP", "GLOBAL", "GPU", "LOCAL", "MPI", "MV2", "MY", "NEURON", "OMPI", "PARALLEL", "PMI", "PMIX", "PP",
    "PROC", "PROCESS", "TORCH", "TP", "TRAINER", "WORKER", "WORLD", "XLA",
}  # fmt: skip
"""What stands before RANK in names of a script's own, and of other launchers'. Not LORA_RANK, and not NODE_RANK, which all ranks of a process share."""
_OTHERS = ("SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_INSTEAD = {"RANK": "xm.get_ordinal()", "LOCAL_RANK": "xr.local_ordinal()", "WORLD_SIZE": "xr.world_size()"}


_looked_at: set[str] = set()
_said: set[tuple[str, int, int]] = set()


def note(last: bool = False) -> None:
    """Say which lines of files that are there by now read a rank, or how many there are, from the environment. Once for a line. Lines in branches that may not
    be taken wait: for arguments to be parsed, and the script to come to where it asks. last: they wait no longer, as a program is about to be compiled."""
    hosted = world.expected().hosted
    if len(hosted) == 1:
        return
    for file in _files():
        if file in _looked_at:
            continue
        found, waits = rank_syntax.tree(file), False
        for node in ast.walk(found) if found is not None else ():
            name = _read(node)
            if name is None or name in os.environ or _is_only_compared(node):
                continue
            taken = known_branches.taken(node, file)
            waits = waits or (taken is not True and not last)
            place = (file, node.lineno, node.col_offset)  # type: ignore[attr-defined]
            if place in _said or not (taken or (last and taken is None)):
                continue
            rank_numbers.report(
                f"{file}:{node.lineno} reads {name} from the environment ({ast.unparse(node)}). This process runs the script once for {len(hosted)} ranks, "  # type: ignore[attr-defined]
                f"which have no environment of their own: all get the same. Use {_INSTEAD.get(name, 'torch.distributed')} (torch.distributed knows it), "
                "or start one process per rank with torchrun.",
                4,
            )
            _said.add(place)
        if not waits:
            _looked_at.add(file)  # not if that was an error, which an import may drop: the next look has it again


def _files() -> Iterator[str]:
    """The script's main file, and modules that lie in its folder."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is None or not os.path.isfile(main) or rank_syntax.is_library(os.path.abspath(main)):
        return
    folder = os.path.dirname(os.path.abspath(main)) + os.sep
    yield main
    for module in list(sys.modules.values()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if (
            isinstance(file, str)
            and file.endswith(".py")
            and file.startswith(folder)
            and file != os.path.abspath(main)
            and not rank_syntax.is_library(file)
        ):
            yield file


def _read(node: ast.AST) -> str | None:
    """The name of the variable that an expression reads, if it is one of these."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        key: ast.expr | None = node.slice if rank_syntax.last_name(node.value) == "environ" else None
    elif isinstance(node, ast.Call) and node.args:
        asks = rank_syntax.last_name(node.func) == "getenv" or (
            isinstance(node.func, ast.Attribute) and node.func.attr == "get" and rank_syntax.last_name(node.func.value) == "environ"
        )
        key = node.args[0] if asks else None
    else:
        return None
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) and _is_of_rank(key.value) else None


def _is_of_rank(name: str) -> bool:
    """Whether a variable has a rank by its name, or how many there are."""
    *before, last = name.upper().split("_")
    return name in _NAMES or name in _OTHERS or (last == "RANK" and _WORDS.issuperset(before))


def _is_only_compared(node: ast.AST) -> bool:
    """Whether a value, or the name that it is given, is compared and printed and no more."""
    for outer in rank_syntax.parents(node):
        if isinstance(outer, (ast.Compare, ast.FormattedValue, ast.Assert)):
            return True
        if isinstance(outer, (ast.If, ast.While)):
            return node not in ast.walk(ast.Module([*outer.body, *outer.orelse], []))
        if isinstance(outer, ast.Assign) and all(isinstance(t, ast.Name) for t in outer.targets):
            names = {t.id for t in outer.targets if isinstance(t, ast.Name)}
            tree = [outer, *rank_syntax.parents(outer)][-1]
            loads = (n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in names and isinstance(n.ctx, ast.Load))
            return all(_is_test(n) for n in loads)
        if not (isinstance(outer, ast.Call) and rank_syntax.last_name(outer.func) in ("int", "str", "print")):
            return False
        if rank_syntax.last_name(outer.func) == "print":
            return True
    return False


def _is_test(name: ast.Name) -> bool:
    outer = next(rank_syntax.parents(name))
    return isinstance(outer, (ast.Compare, ast.FormattedValue, ast.If, ast.BoolOp, ast.IfExp)) or (
        isinstance(outer, ast.UnaryOp) and isinstance(outer.op, ast.Not)
    )
