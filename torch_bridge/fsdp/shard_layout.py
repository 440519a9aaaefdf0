"""How one tensor is shared out among the ranks of a group: as a padded vector, or by rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_bridge.collectives import functional
from torch_bridge.mesh import world
from torch_bridge.mesh.groups import Groups
from torch_bridge.optimizers import param_partition


class ShardLayout:
    """A tensor of shape `size`, cut into `among.size` parts of equal length; the last ones end in zeros where it does not divide.

    multiple: of how many entries a part is, at least. rows: cut along dim 0 (parts are [rows, *size[1:]]), not as a vector (parts are [entries]). A number is
    always a vector.
    """

    def __init__(self, size: Sequence[int], among: Groups, multiple: int = 1, rows: bool = False):
        self.size = torch.Size(size)
        self.among = among
        self.rows = rows and len(self.size) > 0
        self.length = self.size[0] if self.rows else self.size.numel()
        self.part = math.ceil(self.length / (among.size * multiple)) * multiple
        self._rest = tuple(self.size[1:]) if self.rows else ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a part."""
        return (self.part, *self._rest)

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor on xla, as a tensor of its own."""
        padded = self._padded(full)
        if self.among.size == 1:
            return padded.clone()
        from torch_bridge.collectives import rank_slices

        starts = [self.among.index(r) * self.part for r in range(world.size())]  # a table: all processes have one program
        return rank_slices.ops.rank_slice(padded, 0, starts, self.part)

    def gather(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The whole tensor from every rank's part, converted to `dtype` before it travels."""
        whole = functional.all_gather(shard.to(dtype), 0, self._groups())
        return whole[: self.length].reshape(self.size)

    def reduce(self, grad: torch.Tensor, before: float, after: float) -> torch.Tensor:
        """This rank's part of the sum over ranks of a gradient, divided by one number before and by another after the sum; its dtype is the gradient's."""
        given = self._padded(grad)
        given = given if before == 1 else given / before
        return functional.reduce_scatter("sum", given, 1.0 / after, 0, self.among.size, self._groups())

    def divided(self) -> param_partition.Divided:
        """What a part is a part of, for optimizers that look at whole tensors."""
        return param_partition.Divided(tuple(self.size) if self.rows else (self.length,)).cut(0, self.among)

    def _groups(self) -> list[list[int]]:
        return [list(group) for group in self.among.members]

    def _padded(self, full: torch.Tensor) -> torch.Tensor:
        full = full if self.rows else full.reshape(-1)
        missing = self.part * self.among.size - self.length
        return torch.cat([full, full.new_zeros(missing, *self._rest)]) if missing else full
