"""Plans for the Hugging Face models of NxD Training, Llama and Mixtral (`models.hf_models`).

NxD Training                               files of Hugging Face
self_attn.qkv_proj.weight_{q,k,v}          self_attn.{q,k,v}_proj.weight         GQA: with --qkv_linear, or copies of K/V heads; weight_qkv with --fuse_qkv
self_attn.qkv_proj.weight                  the same three, one below the other   STACKED: --fuse_qkv with as many K/V heads as heads
self_attn.{q,k,v}_proj.weight              the same                              SEPARATE: else
mlp.gate_up_proj.weight                    mlp.{gate,up}_proj.weight
mlp.router.linear_router.weight            block_sparse_moe.gate.weight
mlp.expert_mlps.mlp_op.gate_up_proj.weight block_sparse_moe.experts.j.{w1,w3}.weight
mlp.expert_mlps.mlp_op.down_proj.weight    block_sparse_moe.experts.j.w2.weight
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nxd_jax.checkpoint.joining import Split
from nxd_jax.checkpoint.name_maps import Heads, reordered
from nxd_jax.training.converters import entries
from nxd_jax.training.converters.entries import FIRST, LAST, Entry, Plan, Shape
from nxd_jax.training.converters.sizes import Layout, Sizes

GQA, STACKED, SEPARATE = "gqa", "stacked", "separate"
WHOLE = Split(None)

Pack = Callable[..., torch.Tensor]


def attention_of(sizes: Sizes, layout: Layout) -> str:
    """Which of the three projections a model has, by the rules of its constructor."""
    if layout.qkv_linear or layout.copies > 1:
        return GQA
    return STACKED if (layout.fuse_qkv or layout.coalesce_qkv) and not sizes.grouped else SEPARATE


def plan(sizes: Sizes, layout: Layout, attention: str | None = None) -> Plan:
    """The plan of a model on these ranks. attention: GQA, STACKED or SEPARATE; default: as the layout says."""
    found = [_one("model.embed_tokens.weight", (sizes.vocabulary, sizes.hidden), Split(0), FIRST)]
    kind = attention or attention_of(sizes, layout)
    for n in range(sizes.layers):
        layer = f"model.layers.{n}"
        found += [_one(f"{layer}.{norm}.weight", (sizes.hidden,), WHOLE, n) for norm in ("input_layernorm", "post_attention_layernorm")]
        found += _attention(f"{layer}.self_attn", n, sizes, layout, kind)
        found += expert_entries(f"{layer}.mlp", f"{layer}.block_sparse_moe", n, sizes) if sizes.experts else _mlp(f"{layer}.mlp", n, sizes)
    found.append(_one("model.norm.weight", (sizes.hidden,), WHOLE, LAST))
    if not sizes.tied:
        found.append(_one("lm_head.weight", (sizes.vocabulary, sizes.hidden), Split(0), LAST))
    return Plan(found)


def _one(name: str, shape: Shape, split: Split, stage: int | str, pack: Pack | None = None, take: Pack | None = None) -> Entry:
    return Entry(name, (name,), (shape,), split, stage, pack, take)


# -- attention -----------------------------------------------------------------------------------------


def _attention(prefix: str, n: int, sizes: Sizes, layout: Layout, kind: str) -> list[Entry]:
    q, kv, hidden = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim, sizes.hidden
    found = []
    for what, tail in (("weight", (hidden,)), ("bias", ()))[: 1 + sizes.attention_bias]:
        theirs = [f"{prefix}.{letter}_proj.{what}" for letter in "qkv"]
        shapes: list[Shape] = [(q, *tail), (kv, *tail), (kv, *tail)]
        if kind == STACKED:
            found.append(Entry(f"{prefix}.qkv_proj.{what}", tuple(theirs), tuple(shapes), Split(0, 3), n, entries.below, entries.chunk(3)))
            continue
        for letter, name, shape in zip("qkv", theirs, shapes, strict=True):
            ours = f"{prefix}.qkv_proj.{what}_{letter}" if kind == GQA else name
            pack, take = _order(sizes, layout, 0) if letter == "q" else (_copied(sizes, layout), None)
            found.append(Entry(ours, (name,), (shape,), Split(0), n, pack, take))
    found.append(_one(f"{prefix}.o_proj.weight", (hidden, q), Split(1), n, *_order(sizes, layout, 1)))
    if sizes.attention_bias:
        found.append(_one(f"{prefix}.o_proj.bias", (hidden,), WHOLE, n))
    return found


def _order(sizes: Sizes, layout: Layout, dim: int) -> tuple[Pack | None, Pack | None]:
    """Into the ranks' order of query heads, and back."""
    if layout.copies == 1:
        return None, None
    order = Heads(sizes.heads, sizes.kv_heads, layout.copies, layout.tp, layout.neighbours).order()
    back = [order.index(head) for head in range(len(order))]
    return lambda t: reordered(t, order, dim), lambda t, _: reordered(t, back, dim)


def _copied(sizes: Sizes, layout: Layout) -> Pack | None:
    """K or V as often as ranks hold it: all of it again and again (trn1), or each rank's part (trn2)."""
    copies, parts = layout.copies, layout.tp // layout.copies
    if copies == 1:
        return None
    if not layout.neighbours:
        return lambda t: torch.cat([t] * copies)
    return lambda t: torch.cat([part for part in t.chunk(parts) for _ in range(copies)])


# -- MLPs ----------------------------------------------------------------------------------------------


def _mlp(prefix: str, n: int, sizes: Sizes) -> list[Entry]:
    wide, hidden = sizes.intermediate, sizes.hidden
    found = []
    for what, tail in (("weight", (hidden,)), ("bias", ()))[: 1 + sizes.mlp_bias]:
        theirs = (f"{prefix}.gate_proj.{what}", f"{prefix}.up_proj.{what}")
        found.append(Entry(f"{prefix}.gate_up_proj.{what}", theirs, ((wide, *tail),) * 2, Split(0, 2), n, entries.below, entries.chunk(2)))
    found.append(_one(f"{prefix}.down_proj.weight", (hidden, wide), Split(1), n))
    if sizes.mlp_bias:
        found.append(_one(f"{prefix}.down_proj.bias", (hidden,), WHOLE, n))
    return found


def expert_entries(ours: str, theirs: str, n: int, sizes: Sizes) -> list[Entry]:
    """Router and experts of a layer. ours, theirs: what the names begin with."""
    count, wide, hidden = sizes.experts, sizes.intermediate, sizes.hidden

    def experts(*kinds: str) -> tuple[str, ...]:
        return tuple(f"{theirs}.experts.{j}.{kind}.weight" for kind in kinds for j in range(count))

    return [
        Entry(f"{ours}.router.linear_router.weight", (f"{theirs}.gate.weight",), ((count, hidden),), WHOLE, n),
        Entry(
            f"{ours}.expert_mlps.mlp_op.gate_up_proj.weight",
            experts("w1", "w3"),
            ((wide, hidden),) * (2 * count),
            Split(2, 2, experts=True),
            n,
            entries.stacked_gate_up,
            entries.gate_or_up(count),
        ),
        Entry(
            f"{ours}.expert_mlps.mlp_op.down_proj.weight",
            experts("w2"),
            ((hidden, wide),) * count,
            Split(1, experts=True),
            n,
            entries.stacked_down,
            entries.down,
        ),
    ]
