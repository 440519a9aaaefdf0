"""`neuronx_distributed.overrides.transformer_overrides`: rotary embeddings for the layouts of the flash attention kernel."""

from __future__ import annotations

import torch


def apply_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    flash_attn: bool = False,
    transpose_nki_inputs: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their positions (Llama's pairing of the two halves of a head).

    q, k: [batch, heads, length, head_dim], or with `flash_attn and transpose_nki_inputs` [batch, heads, head_dim, length]. cos, sin: tables [positions,
    head_dim] or [1, 1, positions, head_dim] that `position_ids` [batch or 1, length] picks rows of (None: the first rows), or [batch, length, head_dim]
    with the rows picked already. Returns q and k in the dtype that torch's promotion gives.
    """
    transposed = flash_attn and transpose_nki_inputs
    length = q.shape[-1] if transposed else q.shape[-2]
    cos, sin = (_rows(table, position_ids, length).unsqueeze(1) for table in (cos, sin))
    if transposed:
        cos, sin = cos.transpose(-1, -2), sin.transpose(-1, -2)
    dim = -2 if transposed else -1
    return q * cos + _rotated(q, dim) * sin, k * cos + _rotated(k, dim) * sin


def _rows(table: torch.Tensor, position_ids: torch.Tensor | None, length: int) -> torch.Tensor:
    """[batch or 1, length, head_dim]"""
    if table.dim() == 3:
        return table
    table = table.reshape(table.shape[-2:])
    return table[:length].unsqueeze(0) if position_ids is None else table[position_ids]


def _rotated(x: torch.Tensor, dim: int) -> torch.Tensor:
    first, second = x.chunk(2, dim)
    return torch.cat((-second, first), dim)
