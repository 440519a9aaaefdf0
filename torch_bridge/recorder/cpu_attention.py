"""A CPU kernel for the fused attention op of recorded graphs, so that a `GraphModule` of ours also runs in eager torch.

torch has this op for external backends only; on the CPU it would raise.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Attention by torch's plain formula; the results that only a backward kernel needs are empty."""
    if dropout_p:
        raise NotImplementedError(
            "a captured graph with attention dropout cannot run in eager torch, whose mask would differ in the backward; capture the module in eval mode"
        )
    out = _attend(query, key, value, attn_bias, is_causal, scale)
    none = query.new_empty(0)
    zero = torch.zeros((), dtype=torch.int64)
    return out, query.new_empty(query.shape[:-1]), none, none, query.shape[-2], key.shape[-2], zero, zero, none


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    grad_input_mask: list[bool],
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the plain formula (a kernel runs below autograd, and cannot call it)."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    heads = query.shape[1] // key.shape[1]
    k, v = (t.repeat_interleave(heads, 1) if heads > 1 else t for t in (key, value))
    scores = query @ k.mT * scale
    if is_causal:
        attn_bias = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_bias is not None:
        scores = scores.masked_fill(~attn_bias, -torch.inf) if attn_bias.dtype == torch.bool else scores + attn_bias
    weights = aten._safe_softmax(scores, -1)
    grad_weights = grad_out @ v.mT
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True)) * scale
    grad_key, grad_value = (_over_groups(t, heads) for t in (grad_scores.mT @ query, weights.mT @ grad_out))
    return grad_scores @ k, grad_key, grad_value, None


def _over_groups(grad: torch.Tensor, heads: int) -> torch.Tensor:
    """Sum over the query heads that share a key head."""
    return grad.unflatten(1, (-1, heads)).sum(2) if heads > 1 else grad


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, is_causal: bool, scale: float | None
) -> torch.Tensor:
    return aten._scaled_dot_product_attention_math(
        q, k, v, additive(bias, q.dtype), 0.0, is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )[0]


def additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask as torch's plain formula takes it: added to the scores (it reads a bool mask as numbers, not as what to keep)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def install(library: torch.library.Library) -> None:
    """Register both for the CPU."""
    library.impl("_scaled_dot_product_fused_attention_overrideable", forward)
    library.impl("_scaled_dot_product_fused_attention_overrideable_backward", backward)
