"""torch's inference mode, which is left while a module is played: its tensors have no versions. A forward that asks for the mode is not played then."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

ASKED_BY = ("is_inference_mode_enabled", "is_inference")
"""torch's functions, and methods of tensors, that tell of it."""


class _Thread(threading.local):
    """left: this thread is in `left`."""

    left = False


_STATE = _Thread()


@contextlib.contextmanager
def left() -> Iterator[None]:
    """A block without inference mode and without gradients, inside of one with it."""
    outer, _STATE.left = _STATE.left, True
    try:
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        _STATE.left = outer


def on() -> bool:
    """Whether it is on, or was left."""
    return _STATE.left or torch.is_inference_mode_enabled()
