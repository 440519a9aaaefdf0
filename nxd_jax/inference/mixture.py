"""Mixtral's router and experts in place of an MLP. With expert parallelism groups of tensor-parallel ranks share out the experts, and all have all tokens:
each computes its own experts of them, and results are summed over all these ranks at once."""

from __future__ import annotations

from typing import Any

from nxd_jax.modules.moe import ExpertMLPs, MoE, RouterTopK, expert_ranks
from nxd_jax.tensor_parallel import layer_groups, parallel_groups


def mixture(config: Any, layout: dict[str, Any]) -> MoE:
    """A layer's experts, which drop no token. The weights of a token's experts add up to 1, as in transformers: a single one has the weight 1. A
    configuration with `normalize_top_k_affinities=False` has them as they are, such as one of a model that was trained so.

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
    normalize = bool(getattr(config, "normalize_top_k_affinities", True))
    alone = normalize and config.num_experts_per_tok == 1  # experts do not normalise one weight; a softmax over one logit does
    router = RouterTopK(*size, apply_act_fn_over_topk=alone, **layout | {"device": layout["device"] or "cpu"})
    experts = ExpertMLPs(
        *size, config.intermediate_size, config.hidden_act, True, None, normalize_top_k_affinities=normalize and not alone, **layout
    )
    together = expert_ranks.together(parallel_groups.group("tp"), parallel_groups.group("ep")) if parallel_groups.initialized() else None
    return MoE(router, experts, tensor_model_parallel_group=together and layer_groups.Members(together))
