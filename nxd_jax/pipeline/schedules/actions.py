"""What a pipeline rank does at a time: the forward or (part of) the backward pass of one stage for one micro-batch."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple


class Kind(enum.Enum):
    """The computations of a stage, with the letters that torch's pipeline schedules have for them."""

    FORWARD = "F"
    BACKWARD = "B"
    """Both gradients: of the stage's input and of its weights."""
    INPUT_BACKWARD = "I"
    """Only the gradient of the stage's input, for which the stage before waits."""
    WEIGHT_BACKWARD = "W"
    """Only the gradients of the weights, for which nobody waits."""


class Action(NamedTuple):
    """One computation. Its text is torch's: `2F0` is the forward pass of stage 2 for micro-batch 0."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")
_BOTH = re.compile(r"\((.+);(.+)\)OVERLAP_F_B")
_NO_COMPUTATION = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB]\d+)")


def parse(text: str) -> tuple[Action, ...]:
    """The computations of a cell of torch's schedule tables.

    No action for an empty cell and for communication, which follows from the computations; two for `(0F3;3B1)OVERLAP_F_B`. Raises ValueError for other text.
    """
    text = text.strip()
    if not text or _NO_COMPUTATION.fullmatch(text):
        return ()
    if both := _BOTH.fullmatch(text):
        return parse(both[1]) + parse(both[2])
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text!r} is no action of a pipeline schedule: write the stage, one of F (forward), B (backward), I (backward of the input) and W (backward of "
            "the weights), and the micro-batch, as in 2F0"
        )
    return (Action(int(found[1]), Kind(found[2]), int(found[3])),)


def forward(stage: int, microbatch: int) -> Action:
    """`{stage}F{microbatch}`."""
    return Action(stage, Kind.FORWARD, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """`{stage}B{microbatch}`."""
    return Action(stage, Kind.BACKWARD, microbatch)


def input_backward(stage: int, microbatch: int) -> Action:
    """`{stage}I{microbatch}`."""
    return Action(stage, Kind.INPUT_BACKWARD, microbatch)


def weight_backward(stage: int, microbatch: int) -> Action:
    """`{stage}W{microbatch}`."""
    return Action(stage, Kind.WEIGHT_BACKWARD, microbatch)
