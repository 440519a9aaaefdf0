"""A hint, once, for a training loop that never ends its steps: the second `optimizer.step()` of an optimizer in what waits to be compiled as one program.

Every optimizer of torch is seen, through torch's own hooks around a step. A step that records nothing does not count, and a step that calls the one that it
inherits counts once.
"""

from __future__ import annotations

import logging
import sys
import weakref
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

logger = logging.getLogger("torch_bridge")

_said = False
_installed = False
_begun: tuple[weakref.ref[Optimizer], weakref.ref[Any], int] | None = None
"""The step that is being taken: whose, in which segment, and how many ops that had."""
_segment: weakref.ref[Any] | None = None
_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""The optimizers that have stepped in the segment that `_segment` refers to."""


def install() -> None:
    """Look at every step from now on; brings no recorder up."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _installed = True


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global _begun
    if torch.compiler.is_compiling():
        return
    segment = None if _said else _recorded_by(optimizer)
    if segment is not None and (_begun is None or _begun[0]() is not optimizer):
        _begun = weakref.ref(optimizer), weakref.ref(segment), len(segment.nodes)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Count a step; say so if it is the second one in a segment."""
    global _begun, _segment
    if torch.compiler.is_compiling():
        return
    begun, _begun = _begun, None
    segment = None if _said else _recorded_by(optimizer)
    if segment is None or begun is None or begun[0]() is not optimizer:
        return
    ops = len(segment.nodes)
    if ops == (begun[2] if begun[1]() is segment else 0):
        return
    if _segment is None or _segment() is not segment:
        _segment = weakref.ref(segment)
        _stepped.clear()
    if optimizer in _stepped:
        _say(optimizer, ops)
    _stepped.add(optimizer)


def _recorded_by(optimizer: Optimizer) -> Any:
    """The segment into which its steps are recorded; None for one of parameters elsewhere, and while a module is captured."""
    dispatch = sys.modules.get("torch_bridge.recorder.dispatch")
    first = next((p for group in optimizer.param_groups for p in group["params"]), None)
    if dispatch is None or first is None or first.device.type != "xla" or dispatch.STATE.session.current.capture:
        return None
    return dispatch.STATE.session.current


def _say(optimizer: Optimizer, ops: int) -> None:
    from torch_bridge import source

    global _said
    _said = True
    logger.warning(
        "%s: the second step of this %s, and nothing has run since the first: both wait as one graph of %d ops, which grows with every step and is compiled "
        "as a whole. End each training step with torch_xla.sync() (xm.mark_step()), or read batches from an MpDeviceLoader, which does.",
        source.script_line(optimizer) or "optimizer.step()",
        type(optimizer).__name__,
        ops,
    )
