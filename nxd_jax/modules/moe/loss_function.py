"""`neuronx_distributed.modules.moe.loss_function`: the loss that keeps experts equally busy."""

from __future__ import annotations

import torch


def load_balancing_loss_func(router_logits: torch.Tensor, num_experts: int, top_k: int) -> torch.Tensor:
    """How unevenly tokens go to experts (the auxiliary loss of Switch Transformer): a float32 scalar, 1.0 if all experts get the same.

    router_logits: [tokens, num_experts] of this rank's tokens, those of all layers one below the other. The share of choices that each expert gets, times
    its mean probability, summed, times num_experts; gradients flow through the probabilities.

    It is the value of transformers' function of the same name divided by `top_k`: a coefficient taken over from there must be multiplied by `top_k`.
    Raises ValueError for logits of other shapes, and for a top_k that is not in 1..num_experts.
    """
    if router_logits.shape[-1] != num_experts:
        raise ValueError(f"router_logits has shape {tuple(router_logits.shape)}: its last dim must be num_experts={num_experts}")
    if not 0 < top_k <= num_experts:
        raise ValueError(f"top_k={top_k} must be in 1..{num_experts}, the number of experts")
    logits = router_logits.reshape(-1, num_experts)
    chosen = logits.detach().topk(top_k, dim=-1).indices
    share = torch.zeros_like(logits, dtype=torch.float32).scatter(1, chosen, 1.0).mean(0) / top_k
    probability = torch.softmax(logits, dim=-1, dtype=torch.float64).mean(0).to(torch.float32)
    return (share * probability).sum() * num_experts
