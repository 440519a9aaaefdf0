"""Which ranks share out a layer's experts, and whether expert-parallel ranks have the same tokens.

training      expert-parallel ranks are data-parallel ones, with tokens of their own: these travel to the experts and back. The layer sums over the
              tensor-parallel ranks of the experts
inference     all ranks have the same tokens: each computes its own experts, and the layer sums over tensor- and expert-parallel ranks at once
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_bridge.mesh import groups

if TYPE_CHECKING:
    from torch_bridge.mesh.groups import GroupLike

Members = set[frozenset[int]]


def of_phases(kind: str, prefill: Any, decode: Any) -> Any:
    """The group that was given for prefill, decode or both; None for neither. Raises NotImplementedError for groups of other ranks."""
    if prefill is None or decode is None:
        return decode if prefill is None else prefill
    a, b = ([list(ranks) for ranks in groups.resolve(group).members] for group in (prefill, decode))
    if a != b:
        raise NotImplementedError(
            f"cte_{kind}_model_parallel_group has the ranks {a}, tkg_{kind}_model_parallel_group {b}: one copy of the experts serves prefill and decode here; "
            "give both the same groups (init_tensor_expert_parallel_moe_process_groups with the same sizes for both)"
        )
    return prefill


def same_tokens(summed: GroupLike, tensor: GroupLike, expert: GroupLike) -> bool:
    """Whether a layer that sums results over the groups `summed` has the same tokens on all expert-parallel ranks.

    tensor, expert: the groups of the experts. Raises ValueError for sums over other ranks than those of `tensor`, or of `tensor` and `expert` together.
    """
    whole, cut = _members(summed), _members(tensor)
    if whole == cut:
        return False
    together = _joined(cut, _members(expert))
    if whole == together:
        return True
    raise ValueError(
        f"MoE sums results over the ranks {_text(whole)}, but the experts are shared out among the tensor parallel ranks {_text(cut)}, with expert parallel "
        f"ranks {_text(together)}: give MoE and the experts the same tensor_model_parallel_group, or, if expert parallel ranks have the same tokens, MoE the "
        "group of all of them"
    )


def check_equal(summed: GroupLike, shared: GroupLike) -> None:
    """Raises ValueError if shared experts are divided among other ranks than those that their layer sums over."""
    whole, cut = _members(summed), _members(shared)
    if whole != cut:
        raise ValueError(
            f"MoE sums results over the ranks {_text(whole)}, but the shared experts are divided among {_text(cut)}: give both the same "
            "tensor_model_parallel_group"
        )


def together(tensor: GroupLike, expert: GroupLike) -> list[list[int]]:
    """The groups of all ranks that share out the same experts, ranks in order."""
    return sorted(sorted(ranks) for ranks in _joined(_members(tensor), _members(expert)))


def _members(group: GroupLike) -> Members:
    return {frozenset(ranks) for ranks in groups.resolve(group).members}


def _joined(cut: Members, experts: Members) -> Members:
    """Each tensor-parallel group with those of its members' expert-parallel ranks."""
    home = {rank: ranks for ranks in experts for rank in ranks}
    return {frozenset().union(*(home[rank] for rank in ranks)) for ranks in cut}


def _text(found: Members) -> str:
    """The first groups, as lists."""
    lists = sorted(sorted(ranks) for ranks in found)
    shown = ", ".join(str(ranks if len(ranks) <= 8 else f"[{ranks[0]}, {ranks[1]}, ... {len(ranks)} ranks]") for ranks in lists[:4])
    return shown if len(lists) <= 4 else f"{shown}, ..."
