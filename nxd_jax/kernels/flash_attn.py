"""`neuronx_distributed.kernels.flash_attn`."""

from __future__ import annotations

from typing import Any

import torch

from torch_bridge.runtime import backend


def nki_flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lnc: int = 1,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = True,
    mixed_precision: bool = True,
    seed: Any = None,
    hardware_type: object = None,
    transpose_nki_inputs: bool = True,
) -> torch.Tensor:
    """softmax(q k^T * scale) v: [batch, heads, length, head_dim] in the dtype of q, with memory linear in the length.

    q, k, v: [batch, heads, head_dim, length] with `transpose_nki_inputs` (the default), else [batch, heads, length, head_dim]; K/V heads repeated to
    the number of query heads. softmax_scale: default 1/sqrt(head_dim). causal: the only mask there is. dropout_p: of the attention weights; seed:
    int or one-element tensor that alone decides the dropout mask (default: the device's random state, so that every call draws anew and
    activation checkpointing draws the same). mixed_precision is accepted: the softmax and all sums are float32 for half precision either way.
    lnc: logical cores; means nothing here but is checked.

    Any length works, on CPU tensors too; the original wants multiples of 2048. Raises ValueError for shapes that do not fit, also for those
    that look like the other layout, and as the original AssertionError for lnc != 1 with hardware_type trn1.
    """
    if "trn1" in str(getattr(hardware_type, "value", hardware_type)).lower() and lnc != 1:
        raise AssertionError(f"lnc={lnc} on trn1: its NeuronCores cannot be grouped, so lnc must be 1")
    if transpose_nki_inputs:
        _check_layout(q)
        q, k, v = (t.transpose(-1, -2) for t in (q, k, v))
    return _attend(q, k, v, causal, softmax_scale, dropout_p, seed)


def _check_layout(q: torch.Tensor) -> None:
    """The original's head_dim is at most 128: a larger one that is longer than the sequence is a sequence."""
    if q.dim() == 4 and q.shape[-2] > 128 and q.shape[-2] > q.shape[-1]:
        raise ValueError(
            f"nki_flash_attn_func takes [batch, heads, head_dim, length] unless transpose_nki_inputs=False, got q of shape {list(q.shape)}: a head_dim of "
            f"{q.shape[-2]} and a length of {q.shape[-1]}. For [batch, heads, length, head_dim] pass transpose_nki_inputs=False"
        )


def _attend(*args: Any, **kwargs: Any) -> torch.Tensor:
    from torch_bridge.collectives.attention_ops import attend

    backend.ensure()

    return attend(*args, **kwargs)
