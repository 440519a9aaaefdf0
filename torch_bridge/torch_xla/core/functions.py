"""`torch_xla.core.functions`, known as `xf`: collectives that gradients pass through."""

from __future__ import annotations

from typing import Any

import torch

from torch_bridge.collectives import functional
from torch_bridge.collectives.sync_batch_norm import SyncBatchNorm
from torch_bridge.mesh import groups as rank_groups
from torch_bridge.mesh import world
from torch_bridge.mesh.groups import GroupLike

__all__ = ["SyncBatchNorm", "all_gather", "all_reduce", "distributed_mm", "nms"]


def all_reduce(reduce_type: str, value: torch.Tensor, scale: float = 1.0, groups: GroupLike = None) -> torch.Tensor:
    """`xf.all_reduce`: the gradient is that of each rank's own result, which is not exchanged, as in torch_xla.

    For "sum" it is the result's times `scale`: right for a loss that all ranks compute alike from the result. A loss made of what ranks do differently with
    the result needs the sum over ranks (`SyncBatchNorm`, or `neuronx_distributed.parallel_layers.mappings`). Raises RuntimeError in the backward pass of
    "and" and "or".
    """
    return _AllReduce.apply(value, reduce_type, scale, groups)


def all_gather(value: torch.Tensor, dim: int = 0, groups: GroupLike = None) -> torch.Tensor:
    """`xf.all_gather`: the gradient is this rank's part of the result's. (groups: not in torch_xla.)"""
    return _AllGather.apply(value, dim, groups)


def distributed_mm(w: torch.Tensor, x: torch.Tensor, split: int = 1) -> torch.Tensor:
    """`xf.distributed_mm`: a matrix product whose left factor's columns are divided among all ranks.

    w: [N, K / ranks], this rank's columns. x: [K, M], this rank's own. Returns [N, M], the whole factor times x. split: M is worked off in so many parts,
    which takes less memory. Gradients are those of `all_gather` and `all_reduce`. Raises ValueError for sizes that do not fit.
    """
    part = w.shape[1]
    if x.shape[0] != part * world.size() or x.shape[1] % split:
        raise ValueError(
            f"distributed_mm: with w of shape {list(w.shape)}, {world.size()} ranks and split={split}, x must have {part * world.size()} rows and a number of "
            f"columns that divides by {split}; its shape is {list(x.shape)}"
        )
    return torch.cat([_times_all(w, columns) for columns in x.split(x.shape[1] // split, dim=1)], dim=1)


def _times_all(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Every rank's product with its rows of all ranks' x, summed, of which this rank keeps its columns."""
    rank, n = world.rank(), w.shape[1]
    rows = all_gather(x, dim=1).narrow(0, rank * n, n)
    return all_reduce("sum", w @ rows).narrow(1, rank * x.shape[1], x.shape[1])


def nms(boxes: torch.Tensor, scores: torch.Tensor, score_threshold: Any, iou_threshold: Any, output_size: int) -> Any:
    """`xf.nms`: not provided."""
    raise NotImplementedError("torch_xla.core.functions.nms was removed from torch_xla; use torchvision.ops.nms")


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, dim: int, groups: GroupLike) -> torch.Tensor:
        ctx.arguments = value.shape[dim], dim, groups
        return functional.all_gather(value, dim, groups)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        size, dim, groups = ctx.arguments
        place = world.current().table(rank_groups.resolve(groups).index)
        return grad.narrow(dim, place * size, size), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, reduce_type: str, scale: float, groups: GroupLike) -> torch.Tensor:
        ctx.arguments = reduce_type, scale
        result = functional.all_reduce(reduce_type, value, scale, groups)
        if reduce_type != "sum":
            ctx.save_for_backward(value, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        reduce_type, scale = ctx.arguments
        if reduce_type == "sum":
            return grad * scale, None, None, None
        value, result = ctx.saved_tensors
        if reduce_type == "mul":
            return torch.where(value != 0, grad * result / value, 0), None, None, None
        if reduce_type in ("min", "max"):
            return grad * scale * (value * scale == result), None, None, None
        raise RuntimeError(f"all_reduce of type {reduce_type!r} has no gradient")
