"""What expert-parallel ranks' files of NxD hold together: of experts each rank has some, of everything else all have the same.

A plain file of NxD does not say which tensors are of experts, `info.pt` of an "xser" does, and so do both of ours. In what order ranks hold experts only ours
say, if it is not that of their numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from nxd_jax.checkpoint.joining import Held, Need
from nxd_jax.tensor_parallel import expert_shares

Experts = tuple[tuple[int, ...], ...]
"""The experts of each expert-parallel rank."""

FLAG, ORDER = "expert_model_parallel", "expert_distribution"
"""Attributes of parameters, and of tensors in files; keys of `info.pt`."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """What files say of a tensor. experts: whether it is of experts. held: which each rank has, None for equal runs; noted: whether they say that."""

    experts: bool
    held: Experts | None = None
    noted: bool = False


def mark_of(said: Any) -> Mark | None:
    """What an entry of `info.pt`, or the attributes of a tensor, say; None if they do not."""
    if FLAG not in said:
        return None
    order = said.get(ORDER)
    return Mark(bool(said[FLAG]), None if order is None else tuple(tuple(own) for own in order), ORDER in said)


def marks_for(parameter: torch.Tensor) -> dict[str, Any]:
    """What to note beside a tensor of experts, by its parameter's attributes."""
    return {FLAG: True, ORDER: getattr(parameter, ORDER, None)}


@dataclasses.dataclass(frozen=True)
class Peers:
    """What expert-parallel ranks' files have of a tensor: for each of them, what each tensor-parallel rank held. there: whether its values are, too."""

    held: Sequence[Sequence[Held]]
    there: Sequence[bool]
    mark: Mark | None = None

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of what one rank held."""
        return self.held[0][0].shape


def experts_of(name: str, local: Sequence[int], ranks: int, need: Need | None, mark: Mark | None) -> Experts | None:
    """Which experts each of so many ranks had of a tensor, given what is wanted of it; None if all ranks had all of it.

    Raises ValueError if the files, or the model, say otherwise.
    """
    divided = need is not None and (need.experts or _fits(local, ranks, need))
    if mark is not None:
        if divided and not mark.experts:
            raise ValueError(
                f"info.pt says that all {ranks} expert-parallel ranks held the same {name}, and as the model has it they shared it out by experts: the files "
                "are damaged, or of another model"
            )
        divided = mark.experts
    if not divided:
        return None
    equal = expert_shares.runs(ranks, local[0] if local else 1)
    if mark is not None and mark.noted:
        return mark.held or equal
    if need is None or need.held is None:
        return equal
    if len(need.held) != ranks:
        raise ValueError(
            f"{name} has an expert_distribution for {len(need.held)} expert-parallel ranks, the files are of {ranks} and do not say which experts each of them "
            "had: load them at that size, or build the model without expert_distribution"
        )
    return need.held


def _fits(local: Sequence[int], ranks: int, need: Need) -> bool:
    """Whether ranks' dims 0 add up to what is needed. (A dim 0 that tensor-parallel ranks share out may do so by chance.)"""
    if ranks == 1 or need.dim == 0 or not local or len(local) != len(need.shape):
        return False
    return local[0] != need.shape[0] and local[0] * ranks == need.shape[0]


def united(peers: Sequence[Held], held: Experts) -> Held:
    """All experts in the order of their numbers, of what one tensor-parallel rank held on each expert-parallel rank."""
    first = peers[0]
    shape = (sum(p.shape[0] for p in peers), *first.shape[1:])
    return Held(shape, first.dtype, lambda: expert_shares.joined([p.read() for p in peers], held))


def differ(peers: Peers) -> bool | None:
    """Whether expert-parallel ranks held different values of a tensor; None if they all hold one number alone, which says nothing of one that may count experts
    along dim 0 (a vector does not)."""
    first, *rest = [row[0].read() for row in peers.held]
    if not all(first.shape == other.shape and torch.equal(first, other) for other in rest):
        return True
    return None if first.dim() > 1 and first.numel() and bool((first == first.flatten()[0]).all()) else False
