"""`gathered[rank] = x` for a list of tensors, in a process that runs the script once for several ranks: each rank puts its own tensor at its own place.

Losses over all ranks are written so (open_clip, SimCLR, torchmetrics): `all_gather` gives tensors without gradients, and a rank puts its own back, which has
them. Python stores one tensor at the first rank's place. Right after that instruction each place becomes what it is on each rank: the new tensor where the
rank's number is the place, the old one elsewhere. Nothing is done while a debugger or a coverage tool has Python's trace function, which tells when that is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from torch_bridge.mesh import rank_numbers


def for_each_rank(frame: FrameType, container: Any, values: Sequence[int], hosted: Sequence[int], otherwise: Callable[[], None]) -> bool:
    """Have what a frame is about to store at a rank's place of a list stored for each rank; whether that is possible.

    values: the place by rank of the world, of those that this process hosts. otherwise: called if what is stored is no tensor like those it replaces.
    """
    if type(container) is not list or sys.gettrace() is not None:
        return False
    size = len(container)
    if any(not -size <= values[rank] < size for rank in hosted):
        return False  # Python has the error for the first
    places = {rank: values[rank] % size for rank in hosted}
    number = rank_numbers.ranked(tuple(places.get(rank, 0) for rank in range(len(values))), tuple(hosted))
    before = {place: container[place] for place in set(places.values())}
    if not all(isinstance(x, torch.Tensor) for x in before.values()):
        return False

    def stored() -> None:
        new = container[places[hosted[0]]]
        if not all(_alike(new, old) for old in before.values()):
            otherwise()
            return
        at = torch.full((), number, device=new.device) if new.device.type != "cpu" else torch.tensor(number)
        for place, old in before.items():
            container[place] = torch.where(at == place, new, old)

    _after_this_instruction(frame, stored)
    return True


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
