"""`gathered[rank] = x` and `gathered[rank] * 2` for a list of tensors, in a process that runs the script once for several ranks: each rank's own place.

Losses over all ranks are written so (open_clip, SimCLR, torchmetrics): `all_gather` gives tensors without gradients, and a rank puts its own back, which has
them. Python stores one tensor at the first rank's place. Right after that instruction each place becomes what it is on each rank: the new tensor where the
rank's number is the place, the old one elsewhere. What is read, and surely not written to, is one tensor that differs by rank: for that one instruction it lies
at the first rank's place. Nothing is done while a debugger or a coverage tool has Python's trace function, which tells when that is.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from torch_bridge.mesh import rank_numbers
from torch_bridge.script import rank_syntax


def for_each_rank(frame: FrameType, container: Any, values: Sequence[int], hosted: Sequence[int], otherwise: Callable[[], None]) -> bool:
    """Have what a frame is about to store at a rank's place of a list stored for each rank; whether that is possible.

    values: the place by rank of the world, of those that this process hosts. otherwise: called if what is stored is no tensor like those it replaces.
    """
    places = _places(container, values, hosted)
    if places is None:
        return False
    before = {place: container[place] for place in set(places.values())}

    def stored() -> None:
        new = container[places[hosted[0]]]
        if not all(_alike(new, old) for old in before.values()):
            otherwise()
            return
        at = _at(places, len(values), hosted, new.device)
        for place, old in before.items():
            container[place] = torch.where(at == place, new, old)

    _after_this_instruction(frame, stored)
    return True


def read_by_each_rank(frame: FrameType, container: Any, node: ast.Subscript, values: Sequence[int], hosted: Sequence[int]) -> bool:
    """Have what a frame is about to read from a rank's place of a list be each rank's own; whether that is possible, and nobody writes to it."""
    places = _places(container, values, hosted)
    if places is None or not _is_only_read(node, rank_syntax.Names(frame.f_locals, frame.f_globals), 2):
        return False
    first = places[hosted[0]]
    here = container[first]
    others = {place: container[place] for place in places.values() if container[place] is not here}
    if (here.requires_grad and here.is_leaf) or not all(_alike(x, here) and not (x.requires_grad and x.is_leaf) for x in others.values()):
        return False  # a parameter has a gradient of its own
    at, own = _at(places, len(values), hosted, here.device), here
    for place, x in others.items():
        own = torch.where(at == place, x, own)
    container[first] = own

    def restore() -> None:
        container[first] = here

    _after_this_instruction(frame, restore)
    return True


def _places(container: Any, values: Sequence[int], hosted: Sequence[int]) -> dict[int, int] | None:
    """Where in a list of tensors each rank's place is; None for anything else."""
    if type(container) is not list or sys.gettrace() is not None:
        return None
    size = len(container)
    if any(not -size <= values[rank] < size for rank in hosted):
        return None  # Python has the error for the first
    places = {rank: values[rank] % size for rank in hosted}
    return places if all(isinstance(container[place], torch.Tensor) for place in places.values()) else None


def _at(places: dict[int, int], count: int, hosted: Sequence[int], device: torch.device) -> torch.Tensor:
    """Each rank's place, as a tensor."""
    number = rank_numbers.ranked(tuple(places.get(rank, 0) for rank in range(count)), tuple(hosted))
    return torch.full((), number, device=device) if device.type != "cpu" else torch.tensor(number)


def _is_only_read(node: ast.expr, scope: rank_syntax.Names, names: int) -> bool:
    """Whether a tensor is an operand, or given to a function of torch's: not written to, compared by identity or kept. names: how many it may have in turn."""
    outer = next(rank_syntax.parents(node))
    if isinstance(outer, (ast.BinOp, ast.UnaryOp)):
        return True
    if isinstance(outer, ast.AugAssign):
        return outer.target is not node or type(getattr(node, "ctx", None)) is ast.Store  # it is stored for each rank next
    if isinstance(outer, ast.Compare):
        return not any(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in outer.ops)
    if isinstance(outer, ast.Attribute):
        call = next(rank_syntax.parents(outer))
        if not isinstance(call, ast.Call) or call.func is not outer or outer.attr.endswith("_") or outer.attr in _SHARING:
            return False
        then = next(rank_syntax.parents(call))  # `x.to("xla")` may be x
        return not isinstance(then, (ast.Attribute, ast.Assign, ast.Subscript)) or _is_only_read(call, scope, names)
    if isinstance(outer, ast.Subscript):
        return isinstance(outer.ctx, ast.Load) and outer.value is node and _is_only_read(outer, scope, names)
    if isinstance(outer, ast.Call) and node in outer.args:
        called = scope.value(outer.func)
        return isinstance(called, torch.nn.Module) or (
            _is_torchs(called, outer.func, scope) and not any(k.arg == "out" for k in outer.keywords)
        )
    if isinstance(outer, ast.Assign) and names and len(outer.targets) == 1 and isinstance(outer.targets[0], ast.Name):
        name = outer.targets[0].id
        around = rank_syntax.function_of(outer)
        if isinstance(around, ast.Module):
            return False  # others may know it
        found = (n for n in ast.walk(around) if isinstance(n, ast.Name) and n.id == name and not isinstance(n.ctx, ast.Store))
        stored = (n for n in ast.walk(around) if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name) and n.target.id == name)
        return not any(stored) and all(_is_only_read(n, scope, names - 1) for n in found)
    return False


_SHARING = {
    "view",
    "view_as",
    "detach",
    "t",
    "squeeze",
    "unsqueeze",
    "transpose",
    "permute",
    "narrow",
    "select",
    "expand",
    "chunk",
    "split",
    "unbind",
    "backward",
}
"""Methods that give a part of it, which may be written to, or ask it for its gradient."""


def _is_torchs(called: Any, node: ast.expr, scope: rank_syntax.Names) -> bool:
    """Whether this is a function of torch's that makes a new tensor."""
    name = rank_syntax.last_name(node)
    module = getattr(called, "__module__", None) or rank_syntax.root_module(scope, node) or ""
    return callable(called) and module in _MAKING and not name.endswith("_") and name not in _SHARING


_MAKING = {"torch", "torch._C._nn", "torch.nn.functional", "torch.functional", "torch._VariableFunctions"}


def _alike(new: Any, old: torch.Tensor) -> bool:
    return isinstance(new, torch.Tensor) and (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device)


def _after_this_instruction(frame: FrameType, run: Callable[[], None]) -> None:
    """Call `run` before the next instruction of a frame."""
    lines, opcodes = frame.f_trace_lines, frame.f_trace_opcodes

    def trace(at: FrameType, event: str, argument: Any) -> Any:
        sys.settrace(None)
        at.f_trace, at.f_trace_lines, at.f_trace_opcodes = None, lines, opcodes
        run()
        return None

    frame.f_trace, frame.f_trace_lines, frame.f_trace_opcodes = trace, True, True
    sys.settrace(lambda at, event, argument: None)  # no other frames
