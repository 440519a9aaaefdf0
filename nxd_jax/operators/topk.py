"""`neuronx_distributed.operators.topk`."""

from __future__ import annotations

import torch

from nxd_jax.operators import shards
from nxd_jax.tensor_parallel import layer_groups, regions
from torch_bridge.mesh.groups import GroupLike

STAGES = (1, 2, 3)


def topk(
    tensor: torch.Tensor,
    k: int,
    dim: int,
    gather_dim: int,
    process_group: GroupLike = None,
    stages: int = 1,
    rank_id: torch.Tensor | int | None = None,
    use_topk_rotated_kernel: bool = False,
    lnc: int = 2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch.topk(whole, k, dim)` of a tensor of which every rank has a part: (values, int64 indices), largest first, the same on all ranks of the group.

    tensor: this rank's part; of logits [batch, vocabulary], say, [batch, vocabulary / tp], parts in the order of the ranks. gather_dim: the dim that is
    divided. If it is not `dim`, the ranks' own results are put side by side along it. Of equal values the first counts, and NaN counts as the largest.
    (On xla 0.0 counts above -0.0.) Values have a gradient, of which each rank gets the share that belongs to its part.

    process_group: default the tensor parallel group. stages: 1 gathers k candidates of every rank at once; 2 and 3 gather among a few ranks, keep the
    best k, and go on with those that are further apart, which moves less. The results are the same, whatever the number of ranks. rank_id,
    use_topk_rotated_kernel and lnc have no effect.

    Raises IndexError for a dim that the tensor has not, ValueError if k is not between 0 and the size of the whole dim, or for other stages.
    """
    group = layer_groups.tensor_parallel(process_group)
    dim, gather_dim = shards.dims(tensor, dim, gather_dim)
    if stages not in STAGES:
        raise ValueError(f"stages={stages!r} must be 1, 2 or 3")
    size = tensor.shape[dim]
    whole = size * (layer_groups.size(group) if gather_dim == dim else 1)
    if not 0 <= k <= whole:
        raise ValueError(f"k={k} must be between 0 and {whole}, the size of dim {dim} over all ranks")
    values, places = _best(tensor, min(k, size), dim)
    if gather_dim != dim:
        return regions.gather(values, gather_dim, group), regions.gather_along_dim(places, gather_dim, group)
    for some in shards.sub_groups(group, stages):
        places = shards.gather_places(places, dim, size, some)
        size *= layer_groups.size(some)
        values, chosen = _best(regions.gather(values, dim, some), min(k, size), dim)
        places = places.gather(dim, chosen)
    return values, places


def _best(x: torch.Tensor, k: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first of equal values first, which torch leaves open in its own top-k on the CPU."""
    if x.device.type == "xla":
        return torch.topk(x, k, dim)
    values, places = torch.sort(x, dim=dim, descending=True, stable=True)
    return values.narrow(dim, 0, k), places.narrow(dim, 0, k)
