"""What routed experts keep of a micro-batch from the forward to the backward pass, worked out from shapes. (NxD has no such module.)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from nxd_jax.modules.moe import capacity
from nxd_jax.modules.moe.expert_mlps_v2 import ExpertMLPsV2
from nxd_jax.tensor_parallel import layer_groups


class Kept(NamedTuple):
    """A tensor that the experts `name` keep. label: which one. recomputed: it is gone by the backward pass, which makes it again, one layer after the other."""

    name: str
    label: str
    shape: tuple[int, int]
    dtype: torch.dtype
    recomputed: bool


def rows(experts: ExpertMLPsV2, tokens: int) -> int:
    """Rows that a rank's experts compute of so many of its tokens, room that stays empty included.

    With a capacity: every slot of every expert, on one rank or another. Without: every choice of the tokens of all expert-parallel ranks, since they may all
    fall on this rank's experts.
    """
    if experts.drops_tokens(tokens):
        assert experts.capacity_factor is not None
        return experts.num_experts * capacity.expert_capacity(tokens, experts.top_k, experts.capacity_factor, experts.num_experts)
    seen = 1 if experts.has_same_tokens() else layer_groups.size(experts.moe_expert_model_parallel_group)
    return tokens * experts.top_k * seen


def kept(model: torch.nn.Module, tokens: int, checkpoints: Any) -> Iterator[Kept]:
    """What each layer with experts keeps: its rows, what the first product gives, and its results, for the gradient of their weights.

    tokens: of a micro-batch on a rank, whole sequences. checkpoints: the configuration's `activation_checkpoint_config`.
    """
    modules = dict(model.named_modules())
    for name, experts in modules.items():
        if not isinstance(experts, ExpertMLPsV2):
            continue
        count, mlp = rows(experts, tokens), experts.mlp_op
        first = mlp.gate_up_proj.weight if mlp.glu_mlp else mlp.up_proj.weight
        again = checkpoints is not None and _is_recomputed(modules, name, checkpoints)
        for label, width in (("rows", experts.hidden_size), ("first product", first.shape[2]), ("results", experts.hidden_size)):
            yield Kept(name, label, (count, width), first.dtype, again)


def _is_recomputed(modules: dict[str, torch.nn.Module], name: str, checkpoints: Any) -> bool:
    """Whether an activation checkpoint has these experts inside."""
    if checkpoints == "full":
        return True
    classes = tuple(checkpoints) if isinstance(checkpoints, (list, tuple, set)) else (checkpoints,)
    path = name.split(".")
    return any(isinstance(modules[".".join(path[:depth])], classes) for depth in range(len(path) + 1))
