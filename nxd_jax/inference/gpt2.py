"""What GPT-2 has in place of Llama's parts: LayerNorm, an MLP without gate, learned positions; and where its files keep our weights.

ours (model.layers.i.)               files (h.i., some with "transformer." in front)
input_layernorm                      ln_1
self_attn.{q,k,v}_proj               attn.c_attn       [H, 3 H], a Conv1D: transposed, q, k and v beside each other
self_attn.o_proj                     attn.c_proj       transposed
post_attention_layernorm             ln_2
mlp.{up,down}_proj                   mlp.{c_fc,c_proj} transposed
model.{embed_tokens,embed_positions,norm}    {wte,wpe,ln_f}
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_OUTER = {"embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f"}
_NORMS = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
_LINEAR = {"self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}


class MLP(nn.Module):
    """down_proj(activation(up_proj(x))), both with biases. `n_inner` (default 4 hidden_size) that the ranks do not divide is padded."""

    def __init__(self, config: Any, layout: dict[str, Any]):
        super().__init__()
        from transformers.activations import ACT2FN

        inner = config.n_inner or 4 * config.hidden_size
        self.up_proj = ColumnParallelLinear(config.hidden_size, inner, gather_output=False, pad=True, **layout)
        self.down_proj = RowParallelLinear(inner, config.hidden_size, input_is_parallel=True, pad=True, **layout)
        self.act_fn = ACT2FN[config.activation_function]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down_proj(self.act_fn(self.up_proj(x)))
        return found


def norm(config: Any, dtype: torch.dtype) -> nn.Module:
    """A LayerNorm."""
    return nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon, dtype=dtype)


def check(config: Any) -> None:
    """Raises NotImplementedError for a configuration with other scores than GPT-2's, or with cross attention."""
    for name, usual in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False), ("add_cross_attention", False)):
        given = getattr(config, name, usual)
        if given != usual:
            raise NotImplementedError(
                f"{name}={given} of config.json is not supported for gpt2, only {usual}: generate with transformers' model on xla instead "
                "(model.generate)"
            )


def source(mine: str) -> tuple[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Of one of our parameters: the tensor in the files, without "transformer.", and what is made of it."""
    found = _LAYER.fullmatch(mine)
    if found is None:
        part, _, kind = mine.removeprefix("model.").rpartition(".")
        return f"{_OUTER.get(part, part)}.{kind}", _as_it_is
    layer, part, kind = found.groups()
    if part in _NORMS:
        return f"h.{layer}.{_NORMS[part]}.{kind}", _as_it_is
    if part in _LINEAR:
        return f"h.{layer}.{_LINEAR[part]}.{kind}", torch.t
    third = "qkv".index(part.removeprefix("self_attn.")[0])
    return f"h.{layer}.attn.c_attn.{kind}", lambda full: full.t().chunk(3)[third]


def _as_it_is(full: torch.Tensor) -> torch.Tensor:
    return full
