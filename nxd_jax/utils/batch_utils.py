"""`neuronx_distributed.utils.batch_utils`: batches for context parallelism, in which every rank holds a run of each sequence."""

from __future__ import annotations

from typing import Any

import torch

from nxd_jax.parallel_layers import parallel_state
from torch_bridge import sharded, world

IGNORED = -100
"""The label that losses skip."""


def shift_labels(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with `labels` [batch, length] moved one place to the left, so that every token's label stands at its own place; the last is -100.

    Do this to the whole sequence, before `get_batch_on_this_context_parallel_rank`: the label of a rank's last token is the next rank's first token. The
    loss must not shift again. Returns a new dict; a batch without labels is returned as it is.
    """
    labels = batch.get("labels")
    if labels is None:
        return batch
    last = torch.full_like(labels[..., :1], IGNORED)
    return {**batch, "labels": torch.cat((labels[..., 1:], last), dim=-1)}


def get_batch_on_this_context_parallel_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """This rank's run of every sequence: context-parallel rank r takes the r-th of equal runs.

    Cuts dim 1 of tensors, the query dim (-2) of 4-dimensional masks, and the only dim of 1-dimensional `position_ids`; other values stay. Returns a
    new dict (the batch itself without context parallelism). In a process that hosts several ranks, CPU tensors go to xla, since the parts differ.

    Raises ValueError if a sequence does not divide by the context-parallel size.
    """
    size = parallel_state.get_context_model_parallel_size()
    if size == 1:
        return batch
    return {name: _own(name, x, size) if isinstance(x, torch.Tensor) and x.dim() else x for name, x in batch.items()}


def _sequence_dim(name: str, x: torch.Tensor) -> int | None:
    """Which dim runs along the sequence; None for one value per sequence."""
    if x.dim() == 1:
        return 0 if name == "position_ids" else None
    return 2 if x.dim() == 4 else 1


def _own(name: str, x: torch.Tensor, size: int) -> torch.Tensor:
    dim = _sequence_dim(name, x)
    if dim is None:
        return x
    if x.shape[dim] % size:
        raise ValueError(
            f"batch['{name}'] has a sequence length of {x.shape[dim]}, which does not divide by context_parallel_size={size}: pad the sequences"
        )
    length = x.shape[dim] // size
    if x.device.type == "cpu" and len(world.current().hosted) > 1:
        group = parallel_state.get_context_model_parallel_group()
        place = {rank: k for members in group._mesh for k, rank in enumerate(members)}
        return sharded.from_ranks(lambda r: x.narrow(dim, place[r] * length, length).contiguous(), sharded.axes_of(group), dim)
    return x.narrow(dim, parallel_state.get_context_model_parallel_rank() * length, length).contiguous()
