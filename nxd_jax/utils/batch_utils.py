"""`neuronx_distributed.utils.batch_utils`: batches for context parallelism, in which every rank holds a run of each sequence."""

from __future__ import annotations

from typing import Any

import torch

from nxd_jax.tensor_parallel import parallel_groups
from torch_bridge.mesh import sharding, world
from torch_bridge.recorder import sharded
from torch_bridge.recorder.rank_tensor import RankTensor

IGNORED = -100
"""The label that losses skip."""
_MOVED = "_nxd_jax_labels_moved"
"""An attribute of labels that `shift_labels` made."""


def shift_labels(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with `labels` [batch, length] moved one place to the left, so that every token's label stands at its own place; the last is -100.

    The loss must not shift again. `get_batch_on_this_context_parallel_rank` does this itself before it cuts the batch: do not do it before that.
    Returns a new dict; a batch without labels is returned as it is.

    Raises ValueError if labels have no dim along the sequence.
    """
    labels = batch.get("labels")
    if labels is None:
        return batch
    if labels.dim() < 2:
        raise ValueError(f"batch['labels'] has shape {list(labels.shape)}: shift_labels wants [batch, length], a label for every token")
    moved = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)), dim=1)
    setattr(moved, _MOVED, True)
    return {**batch, "labels": moved}


def get_batch_on_this_context_parallel_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """This rank's run of every sequence: context-parallel rank r takes the r-th of equal runs.

    With context parallelism `labels` [batch, length] are moved one place to the left first, as `shift_labels` does: the label of a run's last token is
    the next run's first token. The loss must not shift again. Without it the batch comes back as it is, and the loss shifts, as it would anyway.

    Cuts dim 1 of tensors, the query dim (-2) of 4-dimensional masks, and the only dim of 1-dimensional `position_ids`; a dim of size 1 and other values
    stay. Returns a new dict. In a process that hosts several ranks, CPU tensors go to xla, since the parts differ.

    Raises ValueError if a sequence does not divide by the context-parallel size, or if `shift_labels` already moved the labels.
    """
    size = parallel_groups.size("cp")
    if size == 1:
        return batch
    return {name: _own(name, x, size) if isinstance(x, torch.Tensor) and x.dim() else x for name, x in _moved(batch).items()}


def _moved(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with its labels moved, if there is one for every token."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.dim() < 2:
        return batch
    if getattr(labels, _MOVED, False):
        raise ValueError(
            "batch['labels'] were moved by shift_labels already, and get_batch_on_this_context_parallel_rank would move them again: "
            "with context_parallel_size > 1 leave shift_labels out"
        )
    return shift_labels(batch)


def _sequence_dim(name: str, x: torch.Tensor) -> int | None:
    """Which dim runs along the sequence; None for one value per sequence."""
    if x.dim() == 1:
        return 0 if name == "position_ids" else None
    return 2 if x.dim() == 4 else 1


def _own(name: str, x: torch.Tensor, size: int) -> torch.Tensor:
    dim = _sequence_dim(name, x)
    if dim is None or x.shape[dim] == 1:
        return x
    if x.shape[dim] % size:
        raise ValueError(
            f"batch['{name}'] has a sequence length of {x.shape[dim]}, which does not divide by context_parallel_size={size}: pad the sequences"
        )
    length = x.shape[dim] // size
    if x.device.type == "cpu" and len(world.current().hosted) > 1:
        group = parallel_groups.group("cp")
        place = {rank: k for members in group._mesh for k, rank in enumerate(members)}
        if isinstance(x, RankTensor):  # ranks have other batches, too
            own = [p.narrow(dim, place[r] * length, length).contiguous() for r, p in zip(world.current().hosted, x.parts, strict=True)]
            return RankTensor(own, None if x.axes is None else sharding.ordered({*x.axes, *sharded.axes_of(group)})).to("xla")
        return sharded.from_ranks(lambda r: x.narrow(dim, place[r] * length, length).contiguous(), sharded.axes_of(group), dim)
    return x.narrow(dim, parallel_groups.rank("cp") * length, length).contiguous()
