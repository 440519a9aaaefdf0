"""The micro-batches of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from torch_bridge.runtime import executor, steps


class MicroBatches:
    """Dicts of tensors on the device, given out one by one. A step of the device ends behind each, so that all are computed by the same two programs (the first
    one makes gradients, others add to them), however many there are. What follows, reductions and the optimizer's step, is a program of its own: its state is
    new in the first step, and forward and backward passes are not compiled again for that.
    """

    def __init__(self, parts: Sequence[dict[str, torch.Tensor]]):
        self._parts = parts

    @classmethod
    def cut(cls, batch: Mapping[str, torch.Tensor], size: int, device: torch.device) -> MicroBatches:
        """Those of `size` rows, each with memory of its own: the programs of views of one tensor would have the number of the micro-batch in them."""
        parts = {
            name: [part.to(device) if rows.device != device else part.clone() for part in rows.split(size)] for name, rows in batch.items()
        }
        executor.sync()
        return cls([dict(zip(parts, found, strict=True)) for found in zip(*parts.values(), strict=True)])

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for part in self._parts:
            yield part
            steps.mark()
