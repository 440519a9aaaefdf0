"""Mixtral's router and experts in place of an MLP. With expert parallelism groups of tensor-parallel ranks share out the experts, and all have all tokens."""

from __future__ import annotations

from typing import Any

import torch

from nxd_jax.modules.moe import ExpertMLPs, MoE, RouterTopK, dropless
from nxd_jax.tensor_parallel import layer_groups, parallel_groups, regions


class OwnExperts(ExpertMLPs):
    """`ExpertMLPs` for inference: each expert-parallel rank sends the tokens, which all have, through its own experts; results are summed over the ranks."""

    def _dropless(self, x: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, complete: bool) -> torch.Tensor:
        group = self.moe_expert_model_parallel_group
        count = layer_groups.size(group)
        if count == 1:
            return super()._dropless(x, weights, keys, complete)
        own = self.num_experts // count
        keys = keys - layer_groups.rank(group) * own
        assigned, ends = dropless.assign(torch.where((keys >= 0) & (keys < own), keys, own), own, complete=False)
        out = self._leaving(self.mlp_op.rows(self._entering(x, weights, assigned), ends), weights, assigned)
        return regions.reduce_from_tensor_model_parallel_region(out, group)


def mixture(config: Any, layout: dict[str, Any]) -> MoE:
    """A layer's experts, which drop no token.

    Raises ValueError for experts that the expert-parallel ranks do not divide, and for a width that the tensor-parallel ones do not.
    """
    tp, ep = parallel_groups.size("tp"), parallel_groups.size("ep")
    if config.intermediate_size % tp:
        raise ValueError(
            f"experts of intermediate_size {config.intermediate_size} must be divided by {tp} tensor-parallel ranks: choose another number"
        )
    if config.num_local_experts % ep:
        raise ValueError(f"{config.num_local_experts} experts must be divided by ep_degree={ep}: choose another number")
    size = config.num_local_experts, config.num_experts_per_tok, config.hidden_size
    router = RouterTopK(*size, **layout | {"device": layout["device"] or "cpu"})
    normalize = config.num_experts_per_tok > 1
    experts = OwnExperts(*size, config.intermediate_size, config.hidden_act, True, None, normalize_top_k_affinities=normalize, **layout)
    return MoE(router, experts)
