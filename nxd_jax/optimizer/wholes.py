"""Which tensor a tensor- or expert-parallel parameter is a part of, for optimizers that look at whole tensors; and which optimizers cannot have parts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from nxd_jax.tensor_parallel import grads, parallel_groups
from torch_bridge.mesh import groups
from torch_bridge.optimizers import fused_step, param_partition
from torch_bridge.optimizers.param_partition import Divided

_INSTEAD = "Use AdamW or another optimizer that works element by element, or torch.optim.Adafactor"


def whole_of(p: torch.Tensor) -> Divided:
    """What a parameter is a part of: by its attributes `tensor_model_parallel`, `partition_dim`, `num_partitions` and `expert_model_parallel`."""
    shape = list(p.shape) or [1]
    found = Divided(tuple(shape))
    cuts: list[tuple[int, Any, int]] = []
    if getattr(p, "tensor_model_parallel", False):
        among = groups.resolve(parallel_groups.group("tp"))
        cuts.append((p.partition_dim % len(shape), among, getattr(p, "num_partitions", among.size)))  # type: ignore[attr-defined]
    if grads.is_expert(p):
        among = groups.resolve(parallel_groups.group("ep"))
        cuts.append((0, among, among.size))
    for dim, _, count in cuts:
        shape[dim] *= count
    found = Divided(tuple(shape))
    for dim, among, count in cuts:
        found = found.cut(dim, among, count / among.size)
    return found


def check(optimizer_class: object, params: Sequence[torch.Tensor]) -> None:
    """Raise NotImplementedError for an optimizer that would compute other numbers on parts of parameters than on whole ones.

    Those known by name only, from outside torch, get a UserWarning: on tensor-parallel parameters NxD runs them on the parts too.
    """
    name = getattr(optimizer_class, "__name__", str(optimizer_class))
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.LBFGS):
        raise NotImplementedError(
            f"{name} evaluates the loss several times a step, and gradients are reduced once. Use it without initialize_parallel_optimizer"
        )
    parts = [p for p in params if whole_of(p).cuts]
    if not parts:
        return
    reason = fused_step.why_whole(optimizer_class)
    where = f"on the parts of tensor- or expert-parallel parameters (such as one of shape {list(parts[0].shape)} here) it computes other numbers"
    text = f"{name} {reason}: {where}"
    if reason is not None and optimizer_class.__module__.startswith("torch.optim"):
        raise NotImplementedError(f"{text}. {_INSTEAD}")
    if reason is not None:
        warnings.warn(f"{text}, as it does in NxD. {_INSTEAD}", UserWarning, stacklevel=3)
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Adafactor):
        _check_heads(parts)


def _check_heads(parts: Sequence[torch.Tensor]) -> None:
    for p in parts:
        fused = getattr(p, "qkv_partition", None)
        if fused is not None and fused[2] > 1:
            raise NotImplementedError(
                f"Adafactor: a fused QKV weight whose K/V heads {fused[2]} ranks hold counts them {fused[2]} times in its means. Make the layer with "
                "fuse_qkv=False, or kv_size_multiplier=1"
            )


def prepare(optimizer: torch.optim.Optimizer) -> None:
    """Check an optimizer (without ZeRO-1), and tell it what its parameters are parts of."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    check(type(optimizer), params)
    for p in params:
        param_partition.mark(p, whole_of(p))
