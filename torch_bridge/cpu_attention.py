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
    """Gradients by differentiating the plain formula again."""
    q, k, v = inputs = [t.detach().requires_grad_() for t in (query, key, value)]
    with torch.enable_grad():
        result = _attend(q, k, v, attn_bias, is_causal, scale)
    grads = torch.autograd.grad(result, inputs, grad_out)
    return (*grads, None)


def _attend(q: Any, k: Any, v: Any, bias: Any, is_causal: bool, scale: float | None) -> torch.Tensor:
    return aten._scaled_dot_product_attention_math(q, k, v, bias, 0.0, is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])[0]


def install(library: torch.library.Library) -> None:
    """Register both for the CPU."""
    library.impl("_scaled_dot_product_fused_attention_overrideable", forward)
    library.impl("_scaled_dot_product_fused_attention_overrideable_backward", backward)
