"""The sizes of a model that a conversion needs, from a Hugging Face config.json or from a YAML file of NxD Training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nxd_jax.tensor_parallel import kv_groups


@dataclasses.dataclass(frozen=True)
class Sizes:
    """hidden, head_dim, intermediate, vocabulary: widths (None: not known). experts: 0 for a model without. tied: the head is the embedding. attention_bias,
    mlp_bias: whether projections have biases."""

    layers: int
    heads: int
    kv_heads: int
    hidden: int
    head_dim: int
    intermediate: int | None = None
    vocabulary: int | None = None
    experts: int = 0
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a K/V head."""
        return self.heads != self.kv_heads


def of_json(config: Mapping[str, Any], where: object) -> Sizes:
    """From config.json. Raises ValueError naming the keys that are missing or no positive numbers."""
    known = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    wrong = [key for key in known if not _positive(config.get(key))]
    if wrong:
        raise ValueError(
            f"{where} must give {', '.join(known)} as positive numbers, and {', '.join(f'{k}={config.get(k)!r}' for k in wrong)}"
        )
    layers, heads, hidden = (int(config[key]) for key in known)
    kv = int(config.get("num_key_value_heads") or heads)
    head_dim = config.get("head_dim")
    if not head_dim and hidden % heads:
        raise ValueError(f"{where}: hidden_size={hidden} is no multiple of num_attention_heads={heads}, and there is no head_dim")
    if heads % kv:
        raise ValueError(f"{where}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv}")
    return Sizes(
        layers,
        heads,
        kv,
        hidden,
        int(head_dim or hidden // heads),
        config.get("intermediate_size"),
        config.get("vocab_size"),
        int(config.get("num_local_experts") or 0),
        bool(config.get("tie_word_embeddings", False)),
        bool(config.get("attention_bias", False)),
        bool(config.get("mlp_bias", False)),
    )


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@dataclasses.dataclass(frozen=True)
class Layout:
    """The ranks that files are for. copies: ranks that hold each K/V head. neighbours: they stand side by side (trn2). cuts: names of the layers after which
    a stage ends; empty: layers are shared out evenly. qkv_linear, fuse_qkv: see `hf_plan.attention_of`. vocabulary_unit: Megatron's vocabulary is padded to a
    multiple of it."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1
    copies: int = 1
    neighbours: bool = False
    cuts: tuple[str, ...] = ()
    qkv_linear: bool = False
    fuse_qkv: bool = False
    coalesce_qkv: bool = False
    vocabulary_unit: int = 1

    @property
    def stages(self) -> int:
        return self.pp * self.vpp


def check(sizes: Sizes, layout: Layout, megatron: bool = False) -> None:
    """Raise ValueError that names everything that does not come out even on these ranks, and what would."""
    tp, ep, problems = layout.tp, layout.ep, []
    if min(tp, layout.pp, ep, layout.vpp, layout.copies) < 1:
        raise ValueError(f"numbers of ranks and copies must be positive, got {layout}")
    vocabulary = None if megatron and layout.vocabulary_unit % tp == 0 else sizes.vocabulary
    divided = {"num_attention_heads": sizes.heads, "vocab_size": vocabulary, "intermediate_size": sizes.intermediate}
    problems += [f"{name}={n} is no multiple of --tp_size {tp}" for name, n in divided.items() if n is not None and n % tp]
    fit = kv_groups.fitting_copies(sizes.heads, sizes.kv_heads, tp)
    if megatron and (layout.copies > 1 or sizes.kv_heads % tp):
        problems.append(
            f"--model_style megatron has no copies of K/V heads: {sizes.kv_heads} must be a multiple of --tp_size {tp}, --kv_size_multiplier 1"
        )
    elif layout.copies not in fit:
        allowed = f"use --kv_size_multiplier {' or '.join(map(str, fit))}" if fit else "no --kv_size_multiplier fits that"
        problems.append(
            f"{sizes.kv_heads} K/V heads, {layout.copies} times each, do not fit {sizes.heads} heads on --tp_size {tp} ranks: {allowed}"
        )
    if ep > 1 and (not sizes.experts or sizes.experts % ep):
        problems.append(f"--ep_size {ep} does not divide the model's {sizes.experts} experts")
    if sizes.layers < layout.stages:
        problems.append(f"{sizes.layers} layers cannot make --pp_size {layout.pp} x --virtual_pp_size {layout.vpp} stages")
    if problems:
        raise ValueError("; ".join(problems))
