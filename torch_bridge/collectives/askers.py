"""Who asks a group for its rank: code of torch that chooses by it in Python, which a process that runs the script once for several ranks has to refuse."""

from __future__ import annotations

import sys
from types import FrameType


def frame_of(module: str, depth: int) -> FrameType | None:
    """The innermost frame of a module of torch's among the last `depth` callers; None if there is none. It is not imported for that."""
    if module not in sys.modules:
        return None
    frame: FrameType | None = sys._getframe(2)
    for _ in range(depth):
        if frame is None or frame.f_globals.get("__name__") == module:
            return frame
        frame = frame.f_back
    return None
