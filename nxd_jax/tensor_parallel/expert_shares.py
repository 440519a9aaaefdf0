"""How expert-parallel ranks share out a parameter: by experts along dim 0, as its attributes `expert_model_parallel` and `expert_distribution` say."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nxd_jax.tensor_parallel import layer_groups, parallel_groups
from nxd_jax.tensor_parallel.sharded_weights import Entries
from torch_bridge.collectives import functional
from torch_bridge.mesh import world


def is_shared_out(parameter: torch.Tensor) -> bool:
    """Whether expert-parallel ranks hold different experts of a parameter."""
    return bool(getattr(parameter, "expert_model_parallel", False)) and parallel_groups.initialized() and parallel_groups.size("ep") > 1


def entries_of(parameter: torch.Tensor, layer: object = None) -> Entries | None:
    """Which experts each expert-parallel rank holds; None if ranks do not share the parameter out by experts.

    layer: whose parameter it is, if it is known. For inference it may have groups other than the expert parallel ones.
    """
    own: Entries | None = getattr(layer, "_entries", None)
    if own is not None:
        return own if len(own.held) > 1 and getattr(parameter, "expert_model_parallel", False) else None
    if not is_shared_out(parameter):
        return None
    said: Sequence[Sequence[int]] | None = getattr(parameter, "expert_distribution", None)
    if said is not None:
        return Entries(parallel_groups.group("ep"), tuple(tuple(int(e) for e in own) for own in said))
    size = parameter.shape[0]
    return Entries(parallel_groups.group("ep"), runs(parallel_groups.size("ep"), size))


def runs(count: int, size: int) -> tuple[tuple[int, ...], ...]:
    """For each of `count` ranks the next `size` experts."""
    return tuple(tuple(range(k * size, (k + 1) * size)) for k in range(count))


def order(held: Sequence[Sequence[int]]) -> list[int]:
    """The experts' numbers in the order in which ranks hold them."""
    return [e for own in held for e in own]


def blocks(held: Sequence[Sequence[int]]) -> list[int] | None:
    """For each rank which block of all experts in the order of their numbers it holds; None if some rank's are no such block."""
    size = len(held[0])
    if any(list(own) != list(range(own[0], own[0] + size)) or own[0] % size for own in held):
        return None
    return [own[0] // size for own in held]


def place_of(entries: Entries, rank: int) -> int:
    """The place of a rank of the world in its expert-parallel group."""
    return layer_groups.place_of(entries.group, rank)


def joined(parts: Sequence[torch.Tensor], held: Sequence[Sequence[int]]) -> torch.Tensor:
    """All experts in the order of their numbers, from what each rank of an expert-parallel group holds, in the group's order."""
    return by_number(torch.cat(list(parts)), held)


def by_number(full: torch.Tensor, held: Sequence[Sequence[int]]) -> torch.Tensor:
    """All experts in the order of their numbers, from all in the order in which ranks hold them."""
    there = order(held)
    if there == sorted(there):
        return full
    place = {e: k for k, e in enumerate(there)}
    index = torch.tensor([place[e] for e in range(len(there))])
    return full.index_select(0, index.to(full.device))


def gathered(tensor: torch.Tensor, entries: Entries) -> torch.Tensor:
    """All experts in the order of their numbers on every rank, of an xla tensor. All processes call it."""
    return by_number(functional.all_gather(tensor.contiguous(), 0, entries.group), entries.held)


def members(entries: Entries, rank: int) -> list[int]:
    """The ranks of a rank's expert-parallel group, in order."""
    places = {r: place_of(entries, r) for r in range(world.size())}
    return next(sorted(group, key=places.__getitem__) for group in parallel_groups.lists("ep") if rank in group)
