"""`neuronx_distributed.parallel_layers.comm`: collectives over explicit groups, with `xm`'s arguments.

`groups` is a list of lists of ranks or a process group; None means all ranks. Tensors must be on xla. None of these carries a gradient: use
`mappings` in a model. `pin_layout` is accepted and has no effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torch_bridge.collectives import functional

if TYPE_CHECKING:
    from torch_bridge.mesh.groups import GroupLike


def all_reduce(op: str, tensor_or_list: Any, groups: GroupLike = None, pin_layout: bool = True) -> list[torch.Tensor]:
    """Reduce one tensor or each of a list over the groups, in place; returns the list. op: "sum", "max", "min", "mul", "and", "or"."""
    tensors = [tensor_or_list] if isinstance(tensor_or_list, torch.Tensor) else list(tensor_or_list)
    functional.all_reduce(op, tensors, groups=groups)
    return tensors


def all_gather(input: Any, dim: int = 0, groups: GroupLike = None, output: Any = None, pin_layout: bool = True) -> Any:
    """The group's tensors concatenated along `dim`; written into `output` if it is given."""
    return functional.all_gather(input, dim, groups, output)


def reduce_scatter(
    reduce_type: str,
    input: Any,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: GroupLike = None,
    output: Any = None,
    pin_layout: bool = True,
) -> Any:
    """Reduce over the groups, multiply by `scale` and keep this rank's part of `shard_count` along `scatter_dim`; into `output` if given."""
    return functional.reduce_scatter(reduce_type, input, scale, scatter_dim, shard_count, groups, output)
