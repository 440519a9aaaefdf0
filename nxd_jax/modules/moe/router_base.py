"""What all routers have in common: the linear layer that gives logits, and what makes affinities and scores of them.

Legend: S sequence, B batch, T = S * B tokens, H hidden, E experts, k experts of a token.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from nxd_jax.tensor_parallel import parallel_groups, regions, sharded_weights
from nxd_jax.tensor_parallel.keeps_marks import KeepsMarks

_ACTIVATIONS = ("sigmoid", "softmax")

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class RouterLinear(KeepsMarks, torch.nn.Linear):
    """The router's product: an `nn.Linear` whose parameters stay marked when `load_state_dict(assign=True)` puts others in their place."""


class RouterBase(torch.nn.Module):
    """A linear layer [H] -> [E] that every rank has in full; subclasses say in `forward` what follows from its logits.

    num_experts, top_k, hidden_size: E, k and H. act_fn: "softmax" or "sigmoid", which makes affinities of logits, in float64.
    sequence_parallel_enabled: the input is this rank's part of the sequence along `sequence_dimension` (0 if None). The ranks route their own tokens, then
    all get the logits of all (each keeps its part of their gradient), in training and in eval alike. The gradients of the weight, which has
    `sequence_parallel_enabled` set, must be added up over the ranks, as those of norms are (`grads.allreduce_sequence_parallel_gradients`).
    dtype, device: of the layer's weights; the input is cast to dtype, and so are the logits, also under autocast. bias: the layer has one.
    tensor_model_parallel_group: the ranks that share the sequence out; default the tensor-parallel group, with expert parallelism, too (NxD then takes all
    ranks of the world).
    jitter_eps: in training, multiply the input by random numbers from 1 - jitter_eps to 1 + jitter_eps. The caller's tensor stays as it is (NxD may write
    into it). Tensor-parallel ranks with the same tokens must draw alike, as for dropout: seed them alike.
    store_transposed_weights: keep the weight turned, too, as `weight_T` [H, E], which `preshard_hook` fills; it is not trained, and not used here.
    balancing_bias: have a buffer `e_score_correction_bias` [E] of zeros.

    `e_score_correction_bias`: None, or a float32 tensor [E] that is added to the affinities where experts are chosen, and nowhere else. It may be assigned.

    NaN among a token's logits gives NaN affinities, and so a NaN loss; its experts are still k of 0..E-1. Nothing is raised: that would wait for the
    device in every step. Raises ValueError for top_k outside of 1..num_experts and for another act_fn.
    """

    e_score_correction_bias: torch.Tensor | None

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        act_fn: str,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = "cpu",
        bias: bool = False,
        tensor_model_parallel_group: Any = None,
        jitter_eps: float = 0.0,
        store_transposed_weights: bool = False,
        apply_act_fn_over_topk: bool = False,
        balancing_bias: bool = False,
    ):
        super().__init__()
        if not 0 < top_k <= num_experts:
            raise ValueError(f"top_k={top_k} must be in 1..{num_experts}, the number of experts (num_experts)")
        if act_fn not in _ACTIVATIONS:
            raise ValueError(f"act_fn={act_fn!r} is not one of {', '.join(_ACTIVATIONS)}")
        self.num_experts = num_experts
        self.top_k = top_k
        self.hidden_size = hidden_size
        self.act_fn = act_fn
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = 0 if sequence_parallel_enabled and sequence_dimension is None else sequence_dimension
        self.dtype = dtype
        self.device = device
        self.bias = bias
        self.jitter_eps = jitter_eps
        self.store_transposed_weights = store_transposed_weights
        self.apply_act_fn_over_topk = apply_act_fn_over_topk
        own = parallel_groups.group("tp") if parallel_groups.initialized() else None
        self.tensor_parallel_group = own if tensor_model_parallel_group is None else tensor_model_parallel_group
        self._make_weights("meta" if sharded_weights.is_meta(device) else device, balancing_bias)

    def _make_weights(self, device: Any, balancing_bias: bool) -> None:
        self.linear_router = RouterLinear(self.hidden_size, self.num_experts, bias=self.bias, dtype=self.dtype, device=device)
        for parameter in self.linear_router.parameters():
            parameter.sequence_parallel_enabled = self.sequence_parallel_enabled  # type: ignore[attr-defined]
        if self.store_transposed_weights:
            self.weight_T = torch.nn.Parameter(self.linear_router.weight.detach().t().clone(), requires_grad=False)
        correction = torch.zeros(self.num_experts, dtype=torch.float32, device=device) if balancing_bias else None
        self.register_buffer("e_score_correction_bias", correction)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """What `.to(...)` goes through: the correction of scores stays float32, or its small steps would be lost."""
        before = self._buffers.get("e_score_correction_bias")
        super()._apply(fn, recurse)
        after = self._buffers.get("e_score_correction_bias")
        if before is not None and after is not None and after.dtype != before.dtype:
            self._buffers["e_score_correction_bias"] = before.to(device=after.device)
        return self

    def get_router_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [T, E] of all tokens, in the weight's dtype. hidden_states: [..., H], this rank's part of the sequence with sequence parallelism."""
        with _without_autocast(self.linear_router.weight.device.type):
            x = hidden_states.to(self.linear_router.weight.dtype)
            if self.training and self.jitter_eps != 0.0:
                x = x * torch.empty_like(x).uniform_(1.0 - self.jitter_eps, 1.0 + self.jitter_eps)
            logits = self.linear_router(x)
        if self.sequence_parallel_enabled:
            logits = regions.gather_from_sequence_parallel_region(
                logits, self.sequence_dimension, to_model_parallel=False, process_group=self.tensor_parallel_group
            )
        return logits.reshape(-1, self.num_experts)

    def apply_activation_fn(self, weights: torch.Tensor) -> torch.Tensor:
        """Affinities of logits over the last dim, in float64."""
        wide = weights.to(torch.float64)
        return torch.sigmoid(wide) if self.act_fn == "sigmoid" else torch.softmax(wide, dim=-1)

    def scores_for_choice(self, scores: torch.Tensor) -> torch.Tensor:
        """By what experts are chosen: affinities [T, E], with the correction if there is one; without a gradient."""
        correction = self.e_score_correction_bias
        found = scores.detach()
        return found if correction is None else found + correction.detach().to(found.dtype)

    def forward(self, hidden_states: torch.Tensor) -> Routed:
        """(logits [T, E], affinities [T, E] in the dtype of hidden_states, chosen experts [T, k] int64, without a gradient)."""
        raise NotImplementedError(f"{type(self).__name__}.forward: derive from RouterTopK, or say here which experts the logits choose")

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> None:
        """With `store_transposed_weights`, add `weight_T` to a full checkpoint. prefix: "<name of this module>.weight"."""
        own = prefix.removesuffix("weight")
        weight = model_state_dict.get(f"{own}linear_router.weight")
        if self.store_transposed_weights and weight is not None:
            model_state_dict[f"{own}weight_T"] = weight.detach().t().contiguous()

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.top_k}, act_fn={self.act_fn}"


def _without_autocast(device: str) -> Any:
    off = device == "meta" or not torch.is_autocast_enabled(device)
    return contextlib.nullcontext() if off else torch.autocast(device, enabled=False)
