"""Gradient scalers for divided models with any optimizer: an inf lies with one rank, or at one pipeline stage, and all must skip, and keep one scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_bridge.optimizers import scaled_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from torch_bridge.mesh.groups import GroupLike


def together(optimizer: torch.optim.Optimizer) -> Sequence[GroupLike]:
    """All ranks, if any parameter is a part of a larger one or belongs to a pipeline stage; else no groups."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.device.type == "xla"]
    return (None,) if any(_is_part(p) for p in parameters) else ()


def _is_part(p: torch.Tensor) -> bool:
    from nxd_jax.tensor_parallel import grads  # these bring JAX in, and this module is imported before
    from torch_bridge.mesh import places
    from torch_bridge.recorder import placed

    shared_out = getattr(p, "tensor_model_parallel", False) and getattr(p, "num_partitions", 1) > 1
    return shared_out or grads.is_expert(p) or (places.in_use() and placed.place_of(p) is not None)


scaled_steps.ask(together)
