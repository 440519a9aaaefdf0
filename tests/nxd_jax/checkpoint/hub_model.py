"""A tiny Llama-like model with the names of examples/llama, and the Hugging Face folder of its weights."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from nxd_jax.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_jax.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear

HEADS, KV, SIZE, HIDDEN, INNER, WORDS = 8, 2, 2, 6, 8, 16
CONFIG = {"architectures": ["Tiny"], "num_attention_heads": HEADS, "num_key_value_heads": KV, "hidden_size": HIDDEN}
ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."


class _Attention(nn.Module):
    def __init__(self, copies: int, fuse: bool):
        super().__init__()
        self.qkv_proj = GQAQKVColumnParallelLinear(
            HIDDEN, [HEADS * SIZE, KV * SIZE], bias=True, gather_output=False, kv_size_multiplier=copies, fuse_qkv=fuse
        )
        self.o_proj = RowParallelLinear(HEADS * SIZE, HIDDEN, bias=False, input_is_parallel=True)


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = ColumnParallelLinear(HIDDEN, 2 * INNER, stride=2, bias=False, gather_output=False)
        self.down_proj = RowParallelLinear(INNER, HIDDEN, bias=False, input_is_parallel=True)


class _Layer(nn.Module):
    def __init__(self, copies: int, fuse: bool):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(HIDDEN, bias=False)
        self.self_attn = _Attention(copies, fuse)
        self.mlp = _Mlp()


class _Body(nn.Module):
    def __init__(self, copies: int, fuse: bool):
        super().__init__()
        self.embed_tokens = ParallelEmbedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList([_Layer(copies, fuse)])


class Tiny(nn.Module):
    def __init__(self, copies: int = 1, fuse: bool = True, tied: bool = False):
        super().__init__()
        self.model = _Body(copies, fuse)
        self.lm_head = ColumnParallelLinear(HIDDEN, WORDS, bias=False, gather_output=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Full weights under Hugging Face's names."""
    source = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (WORDS, HIDDEN),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        **{f"{ATTENTION}{k}_proj.weight": (n * SIZE, HIDDEN) for k, n in zip("qkv", (HEADS, KV, KV), strict=True)},
        **{f"{ATTENTION}{k}_proj.bias": (n * SIZE,) for k, n in zip("qkv", (HEADS, KV, KV), strict=True)},
        f"{ATTENTION}o_proj.weight": (HIDDEN, HEADS * SIZE),
        f"{MLP}gate_proj.weight": (INNER, HIDDEN),
        f"{MLP}up_proj.weight": (INNER, HIDDEN),
        f"{MLP}down_proj.weight": (HIDDEN, INNER),
        "lm_head.weight": (WORDS, HIDDEN),
    }
    return {name: torch.randn(shape, generator=source) for name, shape in shapes.items()}


def folder(path: pathlib.Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> pathlib.Path:
    """A Hugging Face folder, written by safetensors."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return path
