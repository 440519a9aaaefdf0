"""The micro-batches of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from torch_bridge.runtime import steps


class MicroBatches:
    """Dicts of tensors on the device, given out one by one. A step of the device ends behind each, so that all are computed by the same two programs (the first
    one makes gradients, others add to them), however many there are. What follows, reductions and the optimizer's step, is a program of its own: its state is
    new in the first step, and forward and backward passes are not compiled again for that.
    """

    def __init__(self, parts: Sequence[dict[str, torch.Tensor]]):
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for part in self._parts:
            yield part
            steps.mark()
