"""Keys and values of earlier tokens, on each rank, in buffers of a fixed size."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nxd_jax.quantization import KVQuantizationConfig
from nxd_jax.quantization.dequantize import direct_cast_dequantize
from nxd_jax.quantization.schemes import rounded

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""What a cache can be quantized to."""


def check_quantization(quantization: KVQuantizationConfig | None) -> None:
    """Raise what `KVCacheManager` does."""
    if quantization is None:
        return
    if not isinstance(quantization, KVQuantizationConfig):
        raise TypeError(
            f"kv_quant_config must be a KVQuantizationConfig or None, got {type(quantization).__name__}: "
            "KVQuantizationConfig() casts to float8_e4m3fn"
        )
    if not quantization.direct_cast:
        raise NotImplementedError(
            "KVQuantizationConfig(direct_cast=False), a KV cache with scales, is not supported: leave direct_cast=True, which casts without them"
        )
    if quantization.quant_dtype not in FLOAT8:
        raise ValueError(
            f"KVQuantizationConfig(quant_dtype={quantization.quant_dtype}) must be one of {', '.join(map(str, FLOAT8))} for a cast without scales"
        )


class KVCacheManager(nn.Module):
    """`KVCacheManager`: `past_key_values` holds K, then V, of each layer: [lines, kv_heads, length, head_dim], zeros at first.

    A line holds a sequence: the token at position p has slot p. What lies behind a sequence's last token is of earlier ones, and must not be read.
    layers, kv_heads: of this rank. lines, length: the most sequences and tokens. In a traced model they are states, which stay on the device from call
    to call. device: "meta" where a model is only traced.

    dtype: of keys and values, as they come and go. quantization: keep them in its `quant_dtype`, cast without a scale; what is above that dtype's bound
    (`DtypeBound`: 240 for float8_e4m3fn) becomes the bound, never infinite. Raises NotImplementedError for direct_cast=False, ValueError for other dtypes
    than float8_e4m3fn and float8_e5m2.
    """

    def __init__(
        self,
        layers: int,
        lines: int,
        kv_heads: int,
        length: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        quantization: KVQuantizationConfig | None = None,
    ):
        super().__init__()
        check_quantization(quantization)
        self.dtype = dtype
        self.quantized = None if quantization is None else quantization.quant_dtype
        shape = (lines, kv_heads, length, head_dim)
        self.past_key_values = nn.ParameterList(
            nn.Parameter(torch.zeros(shape, dtype=self.quantized or dtype, device=device), requires_grad=False) for _ in range(2 * layers)
        )

    def get_cache(self, layer: int, length: int | None = None, seq_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, [rows, kv_heads, length, head_dim]: the first `length` slots (default all) of lines seq_ids [rows] (default all lines)."""
        found = []
        for cache in self._of(layer):
            rows = cache if seq_ids is None else cache.index_select(0, seq_ids)
            read = rows if length is None else rows[:, :, :length]
            found.append(read if self.quantized is None else direct_cast_dequantize(read, self.dtype))
        return found[0], found[1]

    def fill(self, layer: int, k: torch.Tensor, v: torch.Tensor, seq_ids: torch.Tensor | None = None) -> None:
        """Begin sequences: k, v [rows, kv_heads, tokens, head_dim] go to slots 0 to tokens - 1 of lines seq_ids [rows], by default row i to line i."""
        for cache, new in zip(self._of(layer), (k, v), strict=True):
            if seq_ids is None:
                cache[: new.shape[0], :, : new.shape[2]] = self._kept(new)
            else:
                cache[seq_ids, :, : new.shape[2]] = self._kept(new)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, seq_ids: torch.Tensor | None = None) -> None:
        """Go on: k, v [rows, kv_heads, tokens, head_dim] go to slots positions [rows, tokens] of lines seq_ids [rows], by default row i to line i."""
        lines = torch.arange(k.shape[0], device=k.device) if seq_ids is None else seq_ids
        for cache, new in zip(self._of(layer), (k, v), strict=True):
            cache[lines[:, None], :, positions] = self._kept(new).transpose(1, 2)

    def places(self, count: int, device: Any) -> torch.Tensor:
        """The positions that the first `count` slots are of."""
        return torch.arange(count, device=device)

    def _kept(self, new: torch.Tensor) -> torch.Tensor:
        return new if self.quantized is None else rounded(new, self.quantized)

    def _of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.past_key_values[2 * layer], self.past_key_values[2 * layer + 1]
