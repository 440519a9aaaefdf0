"""`torch.cat` and `torch.stack` of many small tensors that are there already, other ones each time: what a script samples from a replay memory, say.

Recorded, each operand is an input of the program of its own. Which of them are one tensor (the next state of one sample is the state of another), and which lie
in memory as they look, differs from sample to sample, and so would the program: each step would be compiled anew. So an op of which several kinds of operands
were seen is computed at once, on the host, and only its result is an input of what is recorded. Operands that wait to be computed are recorded as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_bridge.mesh import places, sharding, spmd
from torch_bridge.recorder.dispatch import record_for_ranks, special
from torch_bridge.recorder.downloads import download
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.recorder.uploads import upload_plain
from torch_bridge.runtime import transfer
from torch_bridge.runtime.session import STATE

aten = torch.ops.aten

MANY = 16
"""Operands from which on an op is looked at."""
SMALL = 1 << 20
"""Bytes of all operands up to which they are put together on the host."""
KINDS = 2
"""Kinds of operands that are recorded before an op counts as one whose operands vary."""
MOST = 256
"""Ops of which kinds of operands are known."""


@special(aten.cat.default, aten.stack.default, aten._stack.default)
def _put_together(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    operands = args[0] if args else kwargs["tensors"]
    if len(operands) >= MANY and _vary(func, operands, args[1:], kwargs):
        return upload_plain(func([download(t) for t in operands], *args[1:], **kwargs))
    return record_for_ranks(func, args, kwargs)


def _vary(func: torch._ops.OpOverload, operands: Sequence[Any], *rest: Any) -> bool:
    """Whether an op is one whose operands vary, and these are all there and small."""
    session = STATE.session
    segment = session.current
    usual = session.runs_as_usual() and segment.watch is None and not segment.capture and session.cpu_constants is None
    if not usual or transfer.WITNESS is not None or sharding.active() or spmd.active() or places.in_use():
        return False
    if not all(type(t) is XLATensor for t in operands):
        return False
    first = operands[0]._layout
    if len(session.kinds) >= MOST:
        session.kinds.clear()
    seen = session.kinds.setdefault((func, str(rest), first.size, first.dtype), set())
    kind = _kind(operands)
    if kind in seen:
        return False
    if len(seen) < KINDS:
        seen.add(kind)
        return False
    return all(map(_is_there, operands)) and sum(t._layout.numel * t._layout.dtype.itemsize for t in operands) <= SMALL


def _is_there(t: XLATensor) -> bool:
    """Whether a tensor is all of its storage, and computed."""
    storage, view = t._storage, t._layout
    there = not storage.pending and (storage.held is not None or storage.constant)
    return there and view.contiguous and view.numel == storage.layout.numel and view.dtype == storage.layout.dtype


def _kind(operands: Sequence[XLATensor]) -> int:
    """What of the operands the program would depend on: their layouts, which of them are one tensor, and which of them others have read in the step."""
    segment = STATE.session.current
    first: dict[int, int] = {}
    return hash(
        tuple(
            (
                storage.layout,
                t._layout,
                storage.constant,
                storage.vid if storage.segment is segment else None,
                first.setdefault(id(storage), k),
            )
            for k, t in enumerate(operands)
            for storage in (t._storage,)
        )
    )
