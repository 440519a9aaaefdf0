"""What `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` call in evaluation without gradients: whole layers as one op, forward only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from torch_bridge.lowerings.activations import gelu, relu
from torch_bridge.lowerings.attention import attention_weights
from torch_bridge.lowerings.matmul import addmm
from torch_bridge.lowerings.normalization import native_layer_norm
from torch_bridge.lowerings.registry import lowering
from torch_bridge.precision.precision_mode import PLAIN, Mode

aten = torch.ops.aten
Array = jax.Array


def _linear(x: Array, weight: Array, bias: Array) -> Array:
    return addmm(bias, x.reshape(-1, x.shape[-1]), weight.T).reshape(*x.shape[:-1], weight.shape[0])


def _keep(mask: Array | None, mask_type: int | None) -> Array | None:
    """Where attention may look, for scores [B, H, S, T]. The op's mask is true, or a number other than 0, where it may not.

    mask_type: 0 for a mask [S, T], 1 for one of keys [B, T], 2 for one of all scores.
    """
    if mask is None:
        return None
    if mask_type not in (0, 1, 2):
        raise ValueError(f"a mask needs mask_type 0 ([S, T]), 1 ([B, T]) or 2 ([B, H, S, T]), got {mask_type}")
    keep = mask == 0
    return keep[:, None, None, :] if mask_type == 1 else keep


@lowering(aten._native_multi_head_attention.default)
def native_multi_head_attention(
    query: Array,
    key: Array,
    value: Array,
    embed_dim: int,
    num_head: int,
    qkv_weight: Array,
    qkv_bias: Array,
    proj_weight: Array,
    proj_bias: Array,
    mask: Array | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Array, Array | None]:
    weights, biases = jnp.split(qkv_weight, 3), jnp.split(qkv_bias, 3)
    q, k, v = (
        jnp.swapaxes(_linear(x, w, b).reshape(*x.shape[:2], num_head, embed_dim // num_head), 1, 2)
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    mixed, p = attention_weights(q, k, v, _keep(mask, mask_type))
    out = _linear(jnp.swapaxes(mixed, 1, 2).reshape(*query.shape[:2], embed_dim), proj_weight, proj_bias)
    if not need_weights:
        return out, None
    return out, p.mean(1).astype(out.dtype) if average_attn_weights else p.astype(out.dtype)


@lowering(aten._transformer_encoder_layer_fwd.default, mode=True)
def transformer_encoder_layer(
    src: Array,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Array,
    qkv_bias: Array,
    proj_weight: Array,
    proj_bias: Array,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Array,
    norm_bias_1: Array,
    norm_weight_2: Array,
    norm_bias_2: Array,
    ffn_weight_1: Array,
    ffn_bias_1: Array,
    ffn_weight_2: Array,
    ffn_bias_2: Array,
    mask: Array | None = None,
    mask_type: int | None = None,
    *,
    mode: Mode = PLAIN,
) -> Array:
    def norm(x: Array, weight: Array, bias: Array) -> Array:
        return native_layer_norm(x, (embed_dim,), weight, bias, eps, mode=mode)[0]

    x = norm(src, norm_weight_1, norm_bias_1) if norm_first else src
    projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
    x = src + native_multi_head_attention(x, x, x, embed_dim, num_heads, *projections, mask, False, False, mask_type)[0]
    if not norm_first:
        x = norm(x, norm_weight_1, norm_bias_1)
    inner = _linear(norm(x, norm_weight_2, norm_bias_2) if norm_first else x, ffn_weight_1, ffn_bias_1)
    x = x + _linear(gelu(inner) if use_gelu else relu(inner), ffn_weight_2, ffn_bias_2)
    return x if norm_first else norm(x, norm_weight_2, norm_bias_2)
