"""`neuronx_distributed_training.lightning_modules.data.utils`: lists of ids, filled to one length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["convert_dict_to_list", "pad_token_list", "pad_token_tensor", "pad_tokens"]


def pad_tokens(tokens: Sequence[int], pad_size: int, pad_token: int) -> list[int]:
    """A list filled with pad_token up to the next multiple of pad_size, at least one. What has such a length stays as it is. (The original adds pad_size
    tokens to a list of two or more times that length.)"""
    wanted = max(-(-len(tokens) // pad_size), 1) * pad_size
    return [*tokens, *[pad_token] * (wanted - len(tokens))]


def pad_token_list(tokenList: Sequence[Sequence[int]], pad_size: int, pad_token: int) -> list[list[int]]:
    """`pad_tokens` of each list. (The original doubles a list of exactly pad_size.)"""
    return [pad_tokens(tokens, pad_size, pad_token) for tokens in tokenList]


def convert_dict_to_list(dict_data: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Columns, of which one is input_ids, as a list of rows."""
    return [{name: column[k] for name, column in dict_data.items()} for k in range(len(dict_data["input_ids"]))]


def pad_token_tensor(
    tensors: Sequence[torch.Tensor], padding_size: int = 4096, padding_value: int = 0, padding_side: str = "right"
) -> torch.Tensor:
    """1-D tensors as rows of [rows, padding_size], of the first one's dtype, filled on the right or on the left.

    Raises ValueError for another side, or a tensor that is longer.
    """
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side must be 'left' or 'right', got {padding_side!r}")
    found = torch.full((len(tensors), padding_size), padding_value, dtype=tensors[0].dtype, device=tensors[0].device)
    for k, values in enumerate(tensors):
        if len(values) > padding_size:
            raise ValueError(
                f"row {k} has {len(values)} tokens, and padding_size is {padding_size}: cut it before, or give a larger padding_size"
            )
        begin = padding_size - len(values) if padding_side == "left" else 0
        found[k, begin : begin + len(values)] = values
    return found
