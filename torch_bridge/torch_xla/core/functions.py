"""`torch_xla.core.functions`, known as `xf`: collectives that gradients pass through."""

from __future__ import annotations

from typing import Any

import torch

from torch_bridge import collectives, world
from torch_bridge import groups as rank_groups


def all_reduce(reduce_type: str, value: torch.Tensor, scale: float = 1.0, groups: Any = None) -> torch.Tensor:
    """`xf.all_reduce`: the gradient of the result is reduced in the same way."""
    return _AllReduce.apply(value, reduce_type, scale, groups)


def all_gather(value: torch.Tensor, dim: int = 0, groups: Any = None) -> torch.Tensor:
    """`xf.all_gather`: the gradient is this rank's part of the result's. (groups: not in torch_xla.)"""
    return _AllGather.apply(value, dim, groups)


def nms(boxes: torch.Tensor, scores: torch.Tensor, score_threshold: Any, iou_threshold: Any, output_size: int) -> Any:
    """`xf.nms`: not provided."""
    raise NotImplementedError("torch_xla.core.functions.nms was removed from torch_xla; use torchvision.ops.nms")


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, dim: int, groups: Any) -> torch.Tensor:
        ctx.arguments = value.shape[dim], dim, groups
        return collectives.all_gather(value, dim, groups)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        size, dim, groups = ctx.arguments
        place = world.current().table(rank_groups.resolve(groups).index)
        return grad.narrow(dim, place * size, size), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, reduce_type: str, scale: float, groups: Any) -> torch.Tensor:
        ctx.arguments = reduce_type, scale, groups
        result = collectives.all_reduce(reduce_type, value, scale, groups)
        if reduce_type != "sum":
            ctx.save_for_backward(value, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        reduce_type, scale, groups = ctx.arguments
        if reduce_type == "sum":
            return collectives.all_reduce(reduce_type, grad, scale, groups), None, None, None
        if reduce_type in ("min", "max"):
            value, result = ctx.saved_tensors
            return grad * scale * (value * scale == result), None, None, None
        raise RuntimeError(f"all_reduce of type {reduce_type!r} has no gradient")
