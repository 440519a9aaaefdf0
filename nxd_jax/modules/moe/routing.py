"""`neuronx_distributed.modules.moe.routing`: which experts each token goes to, and with which weights.

Legend: T tokens, H hidden, E experts, k experts of a token.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from nxd_jax.modules.moe.router_base import Routed, RouterBase

__all__ = ["GroupLimitedRouter", "RouterBase", "RouterSinkhorn", "RouterTopK"]

_TINY = 1e-8
"""What Sinkhorn's algorithm adds to sums that it divides by."""


class RouterTopK(RouterBase):
    """Each token goes to the k experts with the largest logits. Use it with `load_balancing_loss_func`, or with `balancing_bias`.

    apply_act_fn_over_topk: the activation runs over the k chosen logits alone, and all other affinities are 0; else it runs over all E.
    balancing_bias: have `e_score_correction_bias`, and choose by affinities plus that (DeepSeek's balancing without an auxiliary loss; not in NxD).
    The other arguments are as in `RouterBase`.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = "cpu",
        bias: bool = False,
        tensor_model_parallel_group: Any = None,
        act_fn: str = "softmax",
        apply_act_fn_over_topk: bool = False,
        jitter_eps: float = 0.0,
        store_transposed_weights: bool = False,
        balancing_bias: bool = False,
    ):
        super().__init__(
            num_experts,
            top_k,
            hidden_size,
            act_fn,
            sequence_parallel_enabled,
            sequence_dimension,
            dtype,
            device,
            bias,
            tensor_model_parallel_group,
            jitter_eps,
            store_transposed_weights,
            apply_act_fn_over_topk,
            balancing_bias,
        )

    def forward(self, hidden_states: torch.Tensor) -> Routed:
        logits = self.get_router_logits(hidden_states)
        if self.apply_act_fn_over_topk:
            index = self._chosen(logits, None)
            chosen = self.apply_activation_fn(logits.gather(1, index))
            affinities = torch.zeros_like(logits, dtype=chosen.dtype).scatter(1, index, chosen)
        else:
            affinities = self.apply_activation_fn(logits)
            index = self._chosen(logits, affinities)
        return logits, affinities.to(hidden_states.dtype), index

    def _chosen(self, logits: torch.Tensor, affinities: torch.Tensor | None) -> torch.Tensor:
        """By logits, which are in the order of affinities; by those themselves only if there is a correction."""
        if self.e_score_correction_bias is None:
            return logits.detach().topk(self.top_k, dim=-1).indices
        scores = self.apply_activation_fn(logits) if affinities is None else affinities
        return self.scores_for_choice(scores).topk(self.top_k, dim=-1).indices


class RouterSinkhorn(RouterBase):
    """Each token goes to one expert; in training to one that Sinkhorn's algorithm chooses so that all experts get about as many tokens.

    Affinities are the activation of the logits as they are. In eval the largest logit wins.

    sinkhorn_iterations: rounds in which rows and columns of exp(logits) [T, E] are scaled to equal sums, 30 by default. sinkhorn_tol: once a round changes the
    columns' factors by less than this on average, later rounds change nothing (NxD never reads it). The other arguments are as in `RouterBase`.
    Raises NotImplementedError for another top_k than 1, ValueError for a negative number of rounds.
    """

    DEFAULT_SINKHORN_ITERS = 30

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        act_fn: str = "sigmoid",
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = "cpu",
        sinkhorn_iterations: int | None = None,
        sinkhorn_tol: float | None = None,
    ):
        if top_k != 1:
            raise NotImplementedError(f"RouterSinkhorn chooses one expert for each token, got top_k={top_k}: use top_k=1, or RouterTopK")
        if sinkhorn_iterations is not None and sinkhorn_iterations < 0:
            raise ValueError(f"sinkhorn_iterations={sinkhorn_iterations} must not be negative")
        super().__init__(num_experts, top_k, hidden_size, act_fn, sequence_parallel_enabled, sequence_dimension, dtype, device)
        self.sinkhorn_iterations = self.DEFAULT_SINKHORN_ITERS if sinkhorn_iterations is None else sinkhorn_iterations
        self.sinkhorn_tol = sinkhorn_tol

    def forward(self, hidden_states: torch.Tensor) -> Routed:
        logits = self.get_router_logits(hidden_states)
        affinities = self.apply_activation_fn(logits).to(hidden_states.dtype)
        route = logits.detach()
        if self.training:
            route = self._sinkhorn(route.to(torch.float32), num_iters=self.sinkhorn_iterations, tol=self.sinkhorn_tol)
        return logits, affinities, route.argmax(dim=-1, keepdim=True)

    @staticmethod
    def _sinkhorn(cost: torch.Tensor, num_iters: int, tol: float | None = None) -> torch.Tensor:
        """exp(cost) [T, E] with rows scaled to add up to 1 / T and columns to 1 / E, `num_iters` times in turn; cost itself for 0 rounds.

        tol: leave everything as it is once a round changed the columns' factors by less than this on average.
        """
        if num_iters == 0:
            return cost
        tokens, experts = cost.shape
        weights = torch.exp(cost - cost.amax(dim=1, keepdim=True))  # a row's factor takes up what is left out, and nothing overflows
        rows, columns = weights.new_ones(tokens), weights.new_ones(experts)
        going = torch.ones((), dtype=torch.bool, device=cost.device)
        for _ in range(num_iters):
            new_rows = 1.0 / (tokens * ((weights * columns).sum(1) + _TINY))
            new_columns = 1.0 / (experts * ((weights * new_rows[:, None]).sum(0) + _TINY))
            if tol is None:
                rows, columns = new_rows, new_columns
                continue
            still = going & ((new_columns - columns).abs().mean() >= tol)
            rows, columns = torch.where(going, new_rows, rows), torch.where(going, new_columns, columns)
            going = still
        return columns * weights * rows[:, None]


class GroupLimitedRouter(RouterBase):
    """DeepSeek-V3's: experts lie in `n_group` groups, and each token chooses k experts from the `topk_group` groups that suit it best.

    The sigmoid of the logits plus `e_score_correction_bias` says which; a group counts as much as its two best experts together. Affinities are the sigmoid
    alone. The buffer is there from the start, in checkpoints too (NxD reads it, but never makes it), and all of this is done in float64 (NxD: in the
    input's dtype).

    norm_topk_prob: divide each token's affinities by the sum of its k chosen ones. routed_scaling_factor: then multiply them. DeepSeek-V3 has True and 2.5;
    NxD, and the default here, False and 1.0.
    mask_with_zero: experts of other groups count 0.0 as in NxD, so that they still win over a chosen group's experts with negative scores; by default they
    cannot be chosen. The other arguments are as in `RouterBase`.

    Raises ValueError if the groups do not divide the experts, for a topk_group outside of 1..n_group, and if the groups kept have fewer than top_k experts.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        n_group: int,
        topk_group: int,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = "cpu",
        tensor_model_parallel_group: Any = None,
        jitter_eps: float = 0.0,
        norm_topk_prob: bool = False,
        routed_scaling_factor: float = 1.0,
        mask_with_zero: bool = False,
    ):
        _check_groups(num_experts, top_k, n_group, topk_group)
        super().__init__(
            num_experts,
            top_k,
            hidden_size,
            "sigmoid",
            sequence_parallel_enabled,
            sequence_dimension,
            dtype,
            device,
            tensor_model_parallel_group=tensor_model_parallel_group,
            jitter_eps=jitter_eps,
            balancing_bias=True,
        )
        self.n_group = n_group
        self.topk_group = topk_group
        self.norm_topk_prob = norm_topk_prob
        self.routed_scaling_factor = routed_scaling_factor
        self.mask_with_zero = mask_with_zero

    def forward(self, hidden_states: torch.Tensor) -> Routed:
        logits = self.get_router_logits(hidden_states)
        index, affinities = self.noaux_tc_top_k(self.apply_activation_fn(logits))
        if self.norm_topk_prob:
            affinities = affinities / (affinities.gather(1, index).sum(-1, keepdim=True) + 1e-20)
        if self.routed_scaling_factor != 1.0:
            affinities = affinities * self.routed_scaling_factor
        return logits, affinities.to(hidden_states.dtype), index.detach().to(torch.int64)

    def noaux_tc_top_k(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(chosen experts [T, k], affinities [T, E]) from scores [T, E]; affinities are the scores. Subclasses may choose otherwise."""
        by_group = self.scores_for_choice(scores).unflatten(-1, (self.n_group, -1))
        best = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(best).scatter(1, best.topk(self.topk_group, dim=-1).indices, 1.0) > 0
        masked = by_group.masked_fill(~kept[..., None], 0.0 if self.mask_with_zero else -math.inf)
        return masked.flatten(1).topk(self.top_k, dim=-1).indices, scores

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, n_group={self.n_group}, topk_group={self.topk_group}"


def _check_groups(num_experts: int, top_k: int, n_group: int, topk_group: int) -> None:
    if n_group < 1 or num_experts % n_group:
        raise ValueError(f"n_group={n_group} must divide the {num_experts} experts (num_experts)")
    if not 0 < topk_group <= n_group:
        raise ValueError(f"topk_group={topk_group} must be in 1..{n_group}, the number of groups (n_group)")
    if top_k > topk_group * (num_experts // n_group):
        raise ValueError(
            f"top_k={top_k} experts cannot be chosen from topk_group={topk_group} groups of {num_experts // n_group} experts: keep more groups, "
            "or choose fewer experts"
        )
