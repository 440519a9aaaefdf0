"""Tensors of a model to fill with full values, whatever ranks there are now."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from nxd_jax.checkpoint import contents, placement
from nxd_jax.checkpoint.joining import Need
from nxd_jax.checkpoint.placement import Placement
from nxd_jax.tensor_parallel import expert_shares, full_weights
from nxd_jax.tensor_parallel.sharded_weights import Entries
from torch_bridge.runtime import executor

_AT_ONCE = 256 * 2**20
"""Bytes of full tensors after which pending copies are run, so that they do not pile up on the host."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A tensor of a model. keys: the names of the full tensors that it consists of (fused q, k and v by themselves); needs: these. where: how it lies among the
    ranks, None on the CPU."""

    tensor: torch.Tensor
    where: Placement | None
    keys: tuple[str, ...]
    needs: dict[str, Need]

    def write(self, full: Callable[[str], torch.Tensor]) -> None:
        """Give it a value, from the full tensors by key."""
        values = tuple(full(k) for k in self.keys)
        write(self.tensor, values if len(values) > 1 else values[0])


def target_of(name: str, tensor: torch.Tensor) -> Target:
    """A tensor of a model by its name in the state dict."""
    entries = expert_shares.entries_of(tensor)
    if not full_weights.is_shared_out(tensor) and entries is None:
        return Target(tensor, contents.placed(tensor), (name,), {name: Need(tuple(tensor.shape))})
    where = placement.of(tensor)
    if not full_weights.is_shared_out(tensor):
        return Target(tensor, where, (name,), {name: _of_experts(Need(tuple(where.pieces[0].full_shape(where.shape))), entries, tensor)})
    keys = tuple(contents.keys_of(name, where))
    order = getattr(tensor, "rank_ordering", None)
    found = tuple(int(k) for k in order) if isinstance(order, (tuple, list)) else None
    needs = [_of_experts(Need(tuple(p.full_shape(where.shape)), p.dim, p.stride, found), entries, tensor) for p in where.pieces]
    return Target(tensor, where, keys, dict(zip(keys, needs, strict=True)))


def _of_experts(need: Need, entries: Entries | None, tensor: torch.Tensor) -> Need:
    if entries is None:
        return need
    said = getattr(tensor, "expert_distribution", None)
    return dataclasses.replace(need, experts=True, held=None if said is None else entries.held)


def write(tensor: torch.Tensor, full: full_weights.Full) -> None:
    """Give a parameter or buffer its full value, each rank its part."""
    full_weights.write(tensor, lambda r: full_weights.cut_full(tensor, full, r).reshape(tensor.shape))


class Pace:
    """Runs pending copies now and then."""

    def __init__(self) -> None:
        self.bytes = 0

    def add(self, tensor: torch.Tensor) -> None:
        """A tensor was written."""
        self.bytes += tensor.nbytes
        if self.bytes > _AT_ONCE:
            executor.sync()
            self.bytes = 0
