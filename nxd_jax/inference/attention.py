"""Attention of a decoder for inference: over the prompt while it is read, over the KV cache afterwards.

Legend: B rows, S tokens, L cache slots, H query heads, G K/V heads of this rank, D size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from nxd_jax.inference import adapted_linear
from nxd_jax.inference.config import InferenceConfig
from nxd_jax.inference.flash_decoding import attend_together, group_size
from nxd_jax.inference.step import Step
from nxd_jax.kernels import nki_flash_attn_func
from nxd_jax.tensor_parallel import head_plans, parallel_groups
from nxd_jax.training.models.hf_models.attention import head_dim
from nxd_jax.training.models.hf_models.rotary import rotate
from torch_bridge.aot.facts import Heads

FLASH_FROM = 4096
"""Tokens of a prompt from which on its attention is computed blockwise (`nki_flash_attn_func`)."""


def attend(q_BHSD: torch.Tensor, k_BGLD: torch.Tensor, v_BGLD: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v of grouped queries, [B, H, S, D]; the softmax in float32. seen: bool [1 or B, S, L], what each token attends to."""
    B, H, S, D = q_BHSD.shape
    grouped = q_BHSD.unflatten(1, (k_BGLD.shape[1], -1)).flatten(2, 3)
    scores = torch.matmul(grouped, k_BGLD.transpose(2, 3)).float() * D**-0.5
    scores = scores.unflatten(2, (-1, S)).masked_fill(~seen[:, None, None], -torch.inf)
    weights = scores.softmax(-1).to(v_BGLD.dtype).flatten(2, 3)
    return torch.matmul(weights, v_BGLD).reshape(B, H, S, D)


def seen_by(positions: torch.Tensor, slots: torch.Tensor, window: int | None) -> torch.Tensor:
    """bool [..., S, L]: tokens at positions [..., S] see slots [L] up to their own, within a sliding window only the last `window`."""
    back = positions.unsqueeze(-1) - slots
    return (back >= 0) if window is None else (back >= 0) & (back < window)


def unfused(name: str) -> list[str]:
    """A parameter's name; of a fused Wqkv those of q_proj, k_proj and v_proj, which `preshard_hook` takes."""
    return [name.replace(".Wqkv.", f".{part}_proj.") for part in "qkv"] if ".Wqkv." in name else [name]


class Attention(nn.Module):
    """Attention of a rank's heads, with Hugging Face's names: q_proj, k_proj, v_proj, o_proj. `preshard_hook` gives a full checkpoint the ranks' heads.

    With `options.fused_qkv` the first three are one layer, Wqkv, and one product: each rank's rows of q, of k and of v below each other.

    config: transformers'. bias: of q, k and v; out_bias: of o. window: tokens that a token sees, None for all. layout: dtype and device of parameters.
    """

    Wqkv: nn.Module

    def __init__(
        self,
        config: Any,
        layer: int,
        options: InferenceConfig,
        bias: bool,
        out_bias: bool,
        window: int | None,
        layout: dict[str, Any],
    ):
        super().__init__()
        tp = parallel_groups.size("tp")
        self.layer = layer
        self.window = window
        self.head_dim = head_dim(config)
        self.heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", self.heads)
        self.plan = head_plans.plan(self.heads, self.kv_heads, tp, options.gqa)
        self.strategy = options.gqa and options.gqa.value
        self.sharing = group_size(self.plan, tp, self.kv_heads) if options.flash_decoding_enabled else 1
        self.kv_heads_per_rank = len(self.plan.kv) // tp
        q, kv = len(self.plan.query) * self.head_dim, len(self.plan.kv) * self.head_dim
        self.sizes = [q // tp, kv // tp, kv // tp]
        self.fused = options.fused_qkv
        for name, size in (("Wqkv", q + 2 * kv),) if self.fused else (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            self.add_module(name, adapted_linear.column(name, config.hidden_size, size, options.lora_config, bias=bias, **layout))
        self.o_proj = adapted_linear.row("o_proj", q, config.hidden_size, options.lora_config, bias=out_bias, **layout)

    def heads_of(self) -> dict[str, tuple[Heads, ...]]:
        """The heads that ranks share out, by layer (`trace.cuts.describe_in`)."""
        q, kv = (Heads(self.heads, self.kv_heads, of_kv, self.strategy) for of_kv in (False, True))
        if self.fused:
            return {"Wqkv": (q, kv, kv), "o_proj": (q,)}
        return {"q_proj": (q,), "k_proj": (kv,), "v_proj": (kv,), "o_proj": (q,)}

    def preshard_hook(self, model_state_dict: dict[str, torch.Tensor], prefix: str) -> None:
        """Copy, pad, order and fuse the heads of a full checkpoint. Raises RuntimeError for weights of other heads."""
        own = prefix.rpartition(".")[0]
        for name, places, heads in (
            ("q", self.plan.query, self.heads),
            ("k", self.plan.kv, self.kv_heads),
            ("v", self.plan.kv, self.kv_heads),
        ):
            for kind in ("weight", "bias"):
                key = f"{own}.{name}_proj.{kind}"
                if key in model_state_dict:
                    model_state_dict[key] = head_plans.arranged(model_state_dict[key], places, heads)
        key = f"{own}.o_proj.weight"
        if key in model_state_dict:
            model_state_dict[key] = head_plans.arranged(model_state_dict[key], self.plan.query, self.heads, dim=1)
        for kind in ("weight", "bias") if self.fused else ():
            separate = [f"{own}.{name}_proj.{kind}" for name in "qkv"]
            if all(key in model_state_dict for key in separate):
                parts = [model_state_dict.pop(key).chunk(parallel_groups.size("tp")) for key in separate]
                model_state_dict[f"{own}.Wqkv.{kind}"] = torch.cat([part for rank in zip(*parts, strict=True) for part in rank])

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x: [B, S, hidden]."""
        q, k, v = (self._heads(part) for part in self._projected(x, step))
        if step.rotation is not None:
            q, k = rotate(q, *step.rotation), rotate(k, *step.rotation)
        if step.positions is None:
            step.cache.fill(self.layer, k, v, step.seq_ids)
            out = self._over_prompt(q, k, v)
        else:
            step.cache.append(self.layer, k, v, step.positions, step.seq_ids)
            k, v = step.cache.get_cache(self.layer, step.length, step.seq_ids)
            seen = seen_by(step.positions, step.cache.places(k.shape[2], x.device), self.window)
            out = attend(q, k, v, seen) if self.sharing == 1 else attend_together(q, k, v, seen)
        return adapted_linear.through(self.o_proj, out.transpose(1, 2).flatten(2), step.adapter_ids)

    def _projected(self, x: torch.Tensor, step: Step) -> Sequence[torch.Tensor]:
        if self.fused:
            fused: torch.Tensor = self.Wqkv(x)
            return fused.split(self.sizes, dim=-1)
        return [adapted_linear.through(getattr(self, f"{name}_proj"), x, step.adapter_ids) for name in "qkv"]

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _over_prompt(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        length = q.shape[2]
        if length >= FLASH_FROM and (self.window is None or self.window >= length):
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
            return nki_flash_attn_func(q, k, v, transpose_nki_inputs=False)
        slots = torch.arange(length, device=q.device)
        return attend(q, k, v, seen_by(slots, slots, self.window)[None])
