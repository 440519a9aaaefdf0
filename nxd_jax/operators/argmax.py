"""`neuronx_distributed.operators.argmax`."""

from __future__ import annotations

import torch

from nxd_jax.operators import shards
from nxd_jax.tensor_parallel import layer_groups, regions
from torch_bridge.mesh.groups import GroupLike


def argmax(
    tensor: torch.Tensor,
    dim: int,
    gather_dim: int,
    keepdim: bool = False,
    process_group: GroupLike = None,
    disable_argmax_kernel: bool = False,
) -> torch.Tensor:
    """`torch.argmax(whole, dim, keepdim)` of a tensor of which every rank has a part, int64 and the same on all ranks of the group.

    tensor: this rank's part; of logits [batch, vocabulary], say, [batch, vocabulary / tp], parts in the order of the ranks. gather_dim: the dim that is
    divided. If it is not `dim`, the ranks' own results are put side by side along it. Of equal values the first counts, and NaN counts as the largest, as
    in torch. No gradient. process_group: default the tensor parallel group. disable_argmax_kernel has no effect.

    Raises IndexError for a dim that the tensor has not.
    """
    group = layer_groups.tensor_parallel(process_group)
    tensor = tensor.detach()
    dim, gather_dim = shards.dims(tensor, dim, gather_dim)
    if layer_groups.size(group) == 1:
        return torch.argmax(tensor, dim, keepdim)
    value, place = tensor.max(dim, keepdim=True)
    if gather_dim == dim:
        values = regions.gather_along_dim(value, dim, group)
        place = shards.gather_places(place, dim, tensor.shape[dim], group).gather(dim, values.argmax(dim, keepdim=True))
    else:
        place = regions.gather_along_dim(place, gather_dim, group)
    return place if keepdim else place.squeeze(dim)
