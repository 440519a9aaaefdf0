"""The segment that is being recorded: ops that have not run yet."""

from __future__ import annotations

from torch_bridge.ir.segment import Segment


class State:
    """current: the pending segment. It is replaced when it runs."""

    current = Segment()


STATE = State()
