"""What the file of each rank holds, row by row, by the formulas of the original's documentation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.nxd_jax.training.converters import jobs

HEADS, KV, SIZE = 8, 2, 8
TP = 4
ATTENTION = "model.layers.1.self_attn"
MEGATRON = "language_model.encoder.layers.1"


def heads(t: torch.Tensor, *which: int, dim: int = 0) -> torch.Tensor:
    """The rows (columns) of some heads."""
    return torch.cat([t.narrow(dim, head * SIZE, SIZE) for head in which], dim)


@pytest.mark.parametrize("backend", ["trn1", "trn2"])
@pytest.mark.parametrize("fuse", [True, False])
def test_query_heads_stand_with_their_keys(backend: str, fuse: bool, tmp_path: Path) -> None:
    """trn1: K0 K1 K0 K1, and each rank the query heads of its group that the copy before it leaves; trn2: K0 K0 K1 K1, queries in order.

    Fused rows are not three equal parts, as the original takes them to be when it merges: q has twice those of k.
    """
    hub = jobs.hub(tmp_path / "hub")
    weights = jobs.weights(hub)
    q, k, v, o = (weights[f"{ATTENTION}.{letter}_proj.weight"] for letter in "qkvo")
    nxdt = jobs.into(
        hub, tmp_path / "nxdt", f"--tp_size {TP} --kv_size_multiplier 2 --qkv_linear True --fuse_qkv {fuse} --hw_backend {backend}"
    )
    for r in range(TP):
        found = jobs.rank(nxdt, r)
        kv = r % KV if backend == "trn1" else r // (TP // KV)
        copy = r // KV if backend == "trn1" else r % (TP // KV)
        own = [kv * (HEADS // KV) + copy * 2, kv * (HEADS // KV) + copy * 2 + 1]
        parts = [heads(q, *own), heads(k, kv), heads(v, kv)]
        if fuse:
            assert torch.equal(found[f"{ATTENTION}.qkv_proj.weight_qkv"], torch.cat(parts))
        else:
            for letter, part in zip("qkv", parts, strict=True):
                assert torch.equal(found[f"{ATTENTION}.qkv_proj.weight_{letter}"], part)
        assert torch.equal(found[f"{ATTENTION}.o_proj.weight"], heads(o, *own, dim=1))
    back = jobs.back(nxdt, tmp_path / "back", f"--config {hub}/config.json")
    jobs.same(jobs.weights(back), weights)


def test_the_originals_formula_for_trn1(tmp_path: Path) -> None:
    """Chunks of heads in strides, as its converter takes them where every rank has one K/V head."""
    hub = jobs.hub(tmp_path / "hub")
    q = jobs.weights(hub)[f"{ATTENTION}.q_proj.weight"]
    chunks = q.reshape(-1, HEADS // (KV * 2), SIZE, q.shape[1])
    order = [k * TP // KV + i for i in range(TP // KV) for k in range(KV)]
    nxdt = jobs.into(hub, tmp_path / "nxdt", f"--tp_size {TP} --kv_size_multiplier 2")
    for r in range(TP):
        assert torch.equal(jobs.rank(nxdt, r)[f"{ATTENTION}.qkv_proj.weight_q"], chunks[order[r]].flatten(0, 1))


def test_fused_without_groups_and_mlps(tmp_path: Path) -> None:
    hub = jobs.hub(tmp_path / "hub", num_key_value_heads=HEADS, mlp_bias=True)
    weights = jobs.weights(hub)
    nxdt = jobs.into(hub, tmp_path / "nxdt", f"--tp_size {TP} --fuse_qkv True")
    for r in range(TP):
        found = jobs.rank(nxdt, r)
        own = [weights[f"{ATTENTION}.{letter}_proj.weight"].chunk(TP)[r] for letter in "qkv"]
        assert torch.equal(found[f"{ATTENTION}.qkv_proj.weight"], torch.cat(own))
        for kind in ("weight", "bias"):
            gate, up = (weights[f"model.layers.1.mlp.{part}_proj.{kind}"].chunk(TP)[r] for part in ("gate", "up"))
            assert torch.equal(found[f"model.layers.1.mlp.gate_up_proj.{kind}"], torch.cat([gate, up]))
        assert torch.equal(found["model.layers.1.mlp.down_proj.weight"], weights["model.layers.1.mlp.down_proj.weight"].chunk(TP, 1)[r])
        assert torch.equal(found["model.layers.1.mlp.down_proj.bias"], weights["model.layers.1.mlp.down_proj.bias"])
        assert torch.equal(found["lm_head.weight"], weights["lm_head.weight"].chunk(TP)[r])


@pytest.mark.parametrize(("style", "prefix"), [("hf", "model.layers.1.mlp"), ("megatron", f"{MEGATRON}.mlp.moe")])
def test_experts_as_modules_hold_them(style: str, prefix: str, tmp_path: Path) -> None:
    """[experts / ep, hidden, 2 * intermediate / tp]: the original stacks what Hugging Face has as it is, the other way round."""
    hub = jobs.hub(tmp_path / "hub", **jobs.EXPERTS, num_key_value_heads=HEADS)
    weights, theirs = jobs.weights(hub), "model.layers.1.block_sparse_moe"
    nxdt = jobs.into(hub, tmp_path / "nxdt", f"--tp_size 2 --ep_size 2 --model_style {style}")
    for e in range(2):
        for r in range(2):
            found = jobs.rank(nxdt, r, 0, e, experts=True)
            gate_up, down = (found[f"{prefix}.expert_mlps.mlp_op.{name}.weight"] for name in ("gate_up_proj", "down_proj"))
            assert gate_up.shape == (2, 64, 96) and down.shape == (2, 48, 64)
            for j in range(2):
                w1, w2, w3 = (weights[f"{theirs}.experts.{2 * e + j}.{w}.weight"] for w in ("w1", "w2", "w3"))
                assert torch.equal(gate_up[j], torch.cat([w1.T.chunk(2, 1)[r], w3.T.chunk(2, 1)[r]], 1))
                assert torch.equal(down[j], w2.T.chunk(2)[r])
            assert torch.equal(found[f"{prefix}.router.linear_router.weight"], weights[f"{theirs}.gate.weight"])


def test_megatron_has_rows_head_by_head(tmp_path: Path) -> None:
    """q, k and v of each head. The original writes all q of a rank, then k, then v, which is wrong for more than one head on a rank."""
    hub = jobs.hub(tmp_path / "hub", num_key_value_heads=HEADS)
    weights = jobs.weights(hub)
    q, k, v, o = (weights[f"{ATTENTION}.{letter}_proj.weight"] for letter in "qkvo")
    nxdt = jobs.into(hub, tmp_path / "nxdt", f"--tp_size {TP} --model_style megatron")
    for r in range(TP):
        found = jobs.rank(nxdt, r)
        rows = [heads(t, head) for head in (2 * r, 2 * r + 1) for t in (q, k, v)]
        assert torch.equal(found[f"{MEGATRON}.self_attention.query_key_value.weight"], torch.cat(rows))
        assert torch.equal(found[f"{MEGATRON}.self_attention.dense.weight"], heads(o, 2 * r, 2 * r + 1, dim=1))
        gate, up = (weights[f"model.layers.1.mlp.{part}_proj.weight"].chunk(TP)[r] for part in ("gate", "up"))
        assert torch.equal(found[f"{MEGATRON}.mlp.dense_h_to_4h.weight"], torch.cat([gate, up]))
        down = weights["model.layers.1.mlp.down_proj.weight"].chunk(TP, 1)[r]
        assert torch.equal(found[f"{MEGATRON}.mlp.dense_4h_to_h.weight"], down)
        for ours, theirs in (("embedding.word_embeddings", "model.embed_tokens"), ("output_layer", "lm_head")):
            assert torch.equal(found[f"language_model.{ours}.weight"], weights[f"{theirs}.weight"].chunk(TP)[r])
        assert torch.equal(found["language_model.encoder.final_layernorm.weight"], weights["model.norm.weight"])
        assert len(found) == 4 * 6 + 3


def test_megatron_with_grouped_queries(tmp_path: Path) -> None:
    """query as it is; key_value: k and v of each K/V head."""
    hub = jobs.hub(tmp_path / "hub", num_key_value_heads=4)
    weights = jobs.weights(hub)
    q, k, v = (weights[f"{ATTENTION}.{letter}_proj.weight"] for letter in "qkv")
    nxdt = jobs.into(hub, tmp_path / "nxdt", "--tp_size 2 --model_style megatron")
    for r in range(2):
        found = jobs.rank(nxdt, r)
        rows = [heads(t, head) for head in (2 * r, 2 * r + 1) for t in (k, v)]
        assert torch.equal(found[f"{MEGATRON}.self_attention.key_value.weight"], torch.cat(rows))
        assert torch.equal(found[f"{MEGATRON}.self_attention.query.weight"], q.chunk(2)[r])
