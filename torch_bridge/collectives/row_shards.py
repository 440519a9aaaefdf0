"""Tensors cut by rows among the ranks of a group, as ZeRO-1 does: padded along dim 0 until the rows divide, member k holding the k-th part.

One collective moves many tensors: their parts lie side by side in a bucket. What a bucket holds changes no number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torch_bridge.mesh import groups as rank_groups
from torch_bridge.mesh import world
from torch_bridge.mesh.groups import GroupLike
from torch_bridge.runtime import backend

BUCKET = 130 * 2**20
"""Bytes of full tensors that one collective moves, unless told otherwise."""


class RowShards:
    """Cuts tensors by rows among the ranks of `groups` (lists of ranks, a process group, or None for all), and joins them again."""

    def __init__(self, groups: GroupLike = None):
        self.among = rank_groups.resolve(groups)
        self.size = self.among.size

    def shape(self, full: Sequence[int]) -> list[int]:
        """The shape of a part of a tensor of this shape; a number counts as one row."""
        rows, *rest = full or (1,)
        return [math.ceil(rows / self.size), *rest]

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part, as a tensor of its own."""
        rows, *rest = self.shape(full.shape)
        full = full if full.dim() else full.reshape(1)
        missing = rows * self.size - full.shape[0]
        padded = torch.cat([full, full.new_zeros(missing, *rest)]) if missing else full
        if self.size == 1:
            return padded.clone()
        # Starts as a table, also where a process has one rank: all processes must compile the same program, or XLA may leave out in one of them a
        # collective of whose result this rank needs no part, and the others wait for it.
        starts = [self.among.index(r) * rows for r in range(world.size())]
        from torch_bridge.collectives import rank_slices

        return rank_slices.ops.rank_slice(padded, 0, starts, rows)

    def reduce_scatter(
        self, tensors: Sequence[torch.Tensor], scale: float, dtype: torch.dtype, within: torch.dtype | None = None, bucket: int = BUCKET
    ) -> list[torch.Tensor]:
        """The sums over the group times `scale`, this rank's part of each as `dtype`.

        within: the dtype to add up in; None: each tensor's own. bucket: bytes that one collective moves.
        """
        return _row_ops().ops.scatter_rows(list(tensors), scale, within, dtype, bucket, self.size, self.among.text)

    def all_gather(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], dtype: torch.dtype, bucket: int = BUCKET
    ) -> list[torch.Tensor]:
        """The full tensors, of the given shapes, from every rank's parts, converted to `dtype` first."""
        row_ops = _row_ops()
        rows = [s[0] if s else row_ops.NUMBER for s in shapes]
        return row_ops.ops.gather_rows(list(parts), rows, dtype, bucket, self.size, self.among.text)


def _row_ops() -> Any:
    backend.ensure()
    from torch_bridge.collectives import row_shard_ops

    return row_shard_ops
