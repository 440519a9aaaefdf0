"""Adapted layers against dense arithmetic: results, every gradient, merging, and where each factor lies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nxd_jax.modules.lora import (
    LoraConfig,
    LoraConv2d,
    LoraEmbedding,
    LoraGQAQKVParallelLinear,
    LoraLinear,
    LoraModel,
    LoraParallelConv2d,
    LoraParallelEmbedding,
    LoraParallelLinear,
)
from nxd_jax.modules.moe.shared_experts import SharedExperts
from nxd_jax.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_jax.parallel_layers import grads, mappings
from nxd_jax.parallel_layers.layers import (
    ColumnParallelLinear,
    InputChannelParallelConv2d,
    OutputChannelParallelConv2d,
    ParallelEmbedding,
    RowParallelLinear,
)
from nxd_jax.utils.full_weights import gather_full
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.lora.models import full, stir
from torch_bridge.recorder import sharded

R, ALPHA = 3, 6


@dataclasses.dataclass
class Case:
    """A layer, its input, the same layer from full weights, and the axes of (A, B)."""

    make: Callable[[], nn.Module]
    x: Callable[[], torch.Tensor]
    dense: Callable[..., torch.Tensor]
    kind: type
    axes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    tp: int = 2
    world: int = 2
    bias: bool = True


def rows() -> torch.Tensor:
    return torch.randn(4, 2, 8)


def ids() -> torch.Tensor:
    return torch.tensor([[1, 5, 0, 7], [2, 2, 6, 3]])


def image() -> torch.Tensor:
    return torch.randn(2, 4, 5, 6)


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, w, b)


def qkv(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, w, b)


def table(x: torch.Tensor, w: torch.Tensor, b: None) -> torch.Tensor:
    return F.embedding(x, w)


def conv(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    return F.conv2d(x, w, b, (1, 2), (1, 0), (1, 2))


CONV: dict[str, Any] = {"kernel_size": (3, 2), "stride": (1, 2), "padding": (1, 0), "dilation": (1, 2)}
SP = {"sequence_parallel_enabled": True, "sequence_dimension": 0}
TP = ("tp",)

CASES = {
    "linear": Case(lambda: nn.Linear(8, 6), rows, linear, LoraLinear, tp=1),
    "embedding": Case(lambda: nn.Embedding(8, 6, padding_idx=5), ids, table, LoraEmbedding, tp=1, bias=False),
    "conv": Case(lambda: nn.Conv2d(4, 6, **CONV), image, conv, LoraConv2d, tp=1),
    "column": Case(lambda: ColumnParallelLinear(8, 12, gather_output=False), rows, linear, LoraParallelLinear, ((), TP)),
    "column_gathered": Case(lambda: ColumnParallelLinear(8, 12), rows, linear, LoraParallelLinear, ((), TP), world=4),
    "column_stride": Case(lambda: ColumnParallelLinear(8, 12, stride=3), rows, linear, LoraParallelLinear, ((), TP)),
    "column_sp": Case(
        lambda: ColumnParallelLinear(8, 12, gather_output=False, **SP), rows, linear, LoraParallelLinear, ((), TP), tp=4, world=4
    ),  # type: ignore[arg-type]
    "column_ordered": Case(lambda: ColumnParallelLinear(8, 12, rank_ordering=[1, 0]), rows, linear, LoraParallelLinear, ((), TP)),
    "row": Case(lambda: RowParallelLinear(8, 6), rows, linear, LoraParallelLinear, (TP, ()), world=4),
    "row_stride": Case(lambda: RowParallelLinear(8, 6, stride=2), rows, linear, LoraParallelLinear, (TP, ())),
    "row_sp": Case(lambda: RowParallelLinear(8, 6, input_is_parallel=True, **SP), rows, linear, LoraParallelLinear, (TP, ())),  # type: ignore[arg-type]
    "vocabulary": Case(lambda: ParallelEmbedding(8, 6), ids, table, LoraParallelEmbedding, (TP, ()), bias=False),
    "vocabulary_sp": Case(lambda: ParallelEmbedding(8, 6, **SP), ids, table, LoraParallelEmbedding, (TP, ()), bias=False),  # type: ignore[arg-type]
    "columns": Case(lambda: ParallelEmbedding(8, 6, shard_across_embedding=True), ids, table, LoraParallelEmbedding, ((), TP), bias=False),
    "channels_out": Case(lambda: OutputChannelParallelConv2d(4, 6, **CONV), image, conv, LoraParallelConv2d, ((), TP)),
    "channels_in": Case(lambda: InputChannelParallelConv2d(4, 6, **CONV), image, conv, LoraParallelConv2d, (TP, ())),
}


def wrap(layer: nn.Module, **options: Any) -> tuple[LoraModel, Any]:
    """A model of one layer, with an adapter that is not zero; and the adapted layer."""
    options = {"lora_rank": R, "lora_alpha": ALPHA, "target_modules": ["0"], "bias": "lora_only"} | options
    model = LoraModel(nn.Sequential(layer).to("xla"), LoraConfig(**options))
    stir(model)
    return model, model._layers["0"]


def delta(a: torch.Tensor, b: torch.Tensor, kind: type) -> torch.Tensor:
    """The dense update from full factors."""
    if kind in (LoraEmbedding, LoraParallelEmbedding):
        return a @ b.t() * ALPHA / R
    return (b.flatten(1) @ a.flatten(1)).reshape(-1, *a.shape[1:]) * ALPHA / R


def reduce_sequence(model: LoraModel) -> None:
    grads.allreduce_sequence_parallel_gradients(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0))


def whole_output(case: str, layer: Any, out: torch.Tensor) -> torch.Tensor:
    """The full result on every rank, from a rank's part."""
    base = layer.base_layer
    if case == "vocabulary_sp":
        return mappings._gather_along_dim(out, 0).transpose(0, 1)
    if case == "row_sp":
        return mappings._gather_along_dim(out, 0)
    return mappings._gather_along_dim(out, -1) if getattr(base, "gather_output", True) is False else out


def own_input(case: str, layer: Any, x: torch.Tensor) -> torch.Tensor:
    """What a rank is given of the input."""
    if case == "column_sp":
        return mappings._split_along_dim(x, 0)
    return mappings._split_along_dim(x, -1) if getattr(layer.base_layer, "input_is_parallel", False) else x


@pytest.mark.core(keep=3)
@pytest.mark.thorough(keep=7)
@pytest.mark.parametrize("case", CASES)
def test_results_gradients_and_merging(nxd: Nxd, case: str) -> None:
    c = CASES[case]
    nxd(c.world, tp=c.tp)
    torch.manual_seed(0)
    model, layer = wrap(c.make())
    assert type(layer) is c.kind
    a, b = layer.lora_A.weight, layer.lora_B.weight
    assert (sharded.varying(a).axes, sharded.varying(b).axes) == (c.axes if c.tp > 1 else ((), ()))
    assert a.dtype == b.dtype == torch.float32 and all(p.requires_grad for p in (a, b))
    assert not layer.base_layer.weight.requires_grad

    dense_a, dense_b = full(a).requires_grad_(), full(b).requires_grad_()
    weight, bias = full(layer.base_layer.weight), full(layer.base_layer.bias).requires_grad_() if c.bias else None
    x = c.x()
    dense_x = x.clone().requires_grad_() if x.is_floating_point() else x
    want = c.dense(dense_x, weight + delta(dense_a, dense_b, c.kind), bias)
    seed = torch.randn(want.shape)
    (want * seed).sum().backward()

    given = own_input(case, layer, x.to("xla")).detach()
    if x.is_floating_point():
        given.requires_grad_()
    out = model(given)
    for shard in sharded.shards(whole_output(case, layer, out.detach())):
        torch.testing.assert_close(shard, want.detach(), rtol=1e-4, atol=1e-5)
    own_seed = seed.to("xla")
    if case in ("row_sp", "vocabulary_sp"):
        own_seed = mappings._split_along_dim(own_seed if case == "row_sp" else own_seed.transpose(0, 1).contiguous(), 0)
    elif getattr(layer.base_layer, "gather_output", True) is False:
        own_seed = mappings._split_along_dim(own_seed, -1)
    (out * own_seed).sum().backward()
    reduce_sequence(model)
    padding = getattr(layer.base_layer, "padding_idx", None)
    for own, dense in ((a, dense_a), (b, dense_b), *([(layer.base_layer.bias, bias)] if bias is not None else [])):
        assert own.grad is not None and dense.grad is not None
        expected = dense.grad.clone()
        if padding is not None and own is a:
            expected[padding] = 0
        found = gather_full(own.grad, like=own)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for shard in sharded.shards(own.grad) if not sharded.varying(own).axes else []:
            torch.testing.assert_close(shard, expected, rtol=1e-4, atol=1e-4)
    if x.is_floating_point():
        assert dense_x.grad is not None
        gathered = given.grad
        if case == "column_sp":
            gathered = mappings._gather_along_dim(gathered, 0)
        elif getattr(layer.base_layer, "input_is_parallel", False):
            gathered = mappings._gather_along_dim(gathered, -1)
        for shard in sharded.shards(gathered):
            torch.testing.assert_close(shard, dense_x.grad, rtol=1e-4, atol=1e-4)
    check_merging(model, layer, given.detach(), out.detach(), weight + delta(dense_a, dense_b, c.kind).detach())


def check_merging(model: LoraModel, layer: Any, x: torch.Tensor, out: torch.Tensor, merged: torch.Tensor) -> None:
    """Merged weights are the full product; merged gives what unmerged gave; unmerging restores every bit."""
    before = sharded.shards(layer.base_layer.weight.detach())
    model.merge_lora()
    assert layer.merged
    torch.testing.assert_close(full(layer.base_layer.weight), merged, rtol=1e-5, atol=1e-5)
    for found, want in zip(sharded.shards(layer.base_layer(x).detach()), sharded.shards(out), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    again = model(x)
    assert not layer.merged
    for found, want in zip(sharded.shards(again.detach()), sharded.shards(out), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    for found, want in zip(sharded.shards(layer.base_layer.weight.detach()), before, strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("tp, copies, sp", [(1, 1, False), (2, 1, True), (4, 2, False), (4, 4, False)])
def test_grouped_query_attention(nxd: Nxd, tp: int, copies: int, sp: bool, fuse: bool) -> None:
    nxd(tp, tp=tp)
    torch.manual_seed(0)
    layer = GQAQKVColumnParallelLinear(
        8, [16, 4], gather_output=False, kv_size_multiplier=copies, fuse_qkv=fuse, sequence_parallel_enabled=sp
    )
    model, adapted = wrap(layer)
    assert type(adapted) is LoraGQAQKVParallelLinear

    def parts(module: Any, kind: str) -> list[torch.Tensor]:
        if fuse:
            return list(gather_full(getattr(module, f"{kind}_qkv")))
        return [gather_full(getattr(module, f"{kind}_{p}")) for p in "qkv"]  # type: ignore[misc]

    a = full(adapted.lora_A.weight).requires_grad_()
    bs = [t.requires_grad_() for t in parts(adapted.lora_B, "weight")]
    x = torch.randn(4, 2, 8)
    weights, biases = parts(layer, "weight"), parts(layer, "bias")
    want = [F.linear(x, w + b @ a * ALPHA / R, bias) for w, b, bias in zip(weights, bs, biases, strict=True)]
    ranks = range(tp)
    given = mappings._split_along_dim(x.to("xla"), 0) if sp else x.to("xla")
    out = model(given)
    held = [sharded.shards(t.detach()) for t in out]
    q_rows, kv_rows = 16 // tp, 4 * copies // tp
    # seeds that depend on the full outputs alone: every copy of a K/V head counts once for each rank that holds it
    for rank in ranks:
        part = rank % (tp // copies)  # trn1: heads go round the ranks
        expected = [want[0][..., rank * q_rows :][..., :q_rows], *(w[..., part * kv_rows :][..., :kv_rows] for w in want[1:])]
        for found, e in zip(held, expected, strict=True):
            torch.testing.assert_close(found[rank], e.detach(), rtol=1e-4, atol=1e-5)
    sum((t * t).sum() for t in out).backward()
    reduce_sequence(model)
    total = (want[0] ** 2).sum() + copies * ((want[1] ** 2).sum() + (want[2] ** 2).sum())
    total.backward()
    torch.testing.assert_close(gather_full(adapted.lora_A.weight.grad, like=adapted.lora_A.weight), a.grad, rtol=1e-4, atol=1e-3)
    for (_, own), b in zip(adapted.lora_B.named_parameters(), [bs] if fuse else bs, strict=True):
        found = gather_full(own.grad, like=own)
        for f, dense in zip(found if fuse else [found], b if fuse else [b], strict=True):
            torch.testing.assert_close(f, dense.grad, rtol=1e-4, atol=1e-3)
    model.merge_lora()
    for found, w, b in zip(parts(layer, "weight"), weights, bs, strict=True):
        torch.testing.assert_close(found, (w + b @ a * ALPHA / R).detach(), rtol=1e-5, atol=1e-5)
    model.unmerge_lora()
    assert all(torch.equal(f, w) for f, w in zip(parts(layer, "weight"), weights, strict=True))


@pytest.mark.parametrize("fuse", [False, True])
def test_parts_of_grouped_query_attention(nxd: Nxd, fuse: bool) -> None:
    """A rank's own rows of q, k and v, and what merging adds to them."""
    nxd(4, tp=4)
    torch.manual_seed(0)
    model, layer = wrap(GQAQKVColumnParallelLinear(8, [16, 4], gather_output=False, kv_size_multiplier=2, fuse_qkv=fuse, bias=False))
    b, base = layer.get_qkv(layer.lora_B), layer.get_qkv(layer.base_layer)
    assert [tuple(t.shape) for t in b] == [(4, R), (2, R), (2, R)] and [tuple(t.shape) for t in base] == [(4, 8), (2, 8), (2, 8)]
    before = [sharded.shards(t.detach().clone()) for t in base]
    deltas = [sharded.shards(t.detach()) for t in layer.get_delta_weight()]
    a = full(layer.lora_A.weight)
    for part, delta in zip(b, deltas, strict=True):
        for own, found in zip(sharded.shards(part.detach()), delta, strict=True):
            torch.testing.assert_close(found, own @ a.detach() * ALPHA / R, rtol=1e-5, atol=1e-6)
    model.merge_lora()
    for part, old, delta in zip(layer.get_qkv(layer.base_layer), before, deltas, strict=True):
        for now, was, added in zip(sharded.shards(part.detach()), old, delta, strict=True):
            torch.testing.assert_close(now, was + added, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["linear", "embedding", "conv", "row", "vocabulary"])
def test_names_of_the_original(nxd: Nxd, case: str) -> None:
    c = CASES[case]
    nxd(2, tp=c.tp)
    torch.manual_seed(0)
    model, layer = wrap(c.make())
    base = layer.get_base_layer()
    assert type(base) is type(c.make()) and base is layer.base_layer
    assert (layer.lora_alpha, layer.lora_rank, layer.scaling) == (ALPHA, R, ALPHA / R)
    assert layer.adapter_layer_names == ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
    before = sharded.shards(base.weight.detach().clone())
    added = sharded.shards(layer.get_delta_weight().detach())
    layer.merge(safe_merge=True)
    for now, was, delta_ in zip(sharded.shards(base.weight.detach()), before, added, strict=True):
        torch.testing.assert_close(now, was + delta_, rtol=1e-5, atol=1e-6)
    layer.unmerge()
    with torch.no_grad():
        layer.lora_B.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=f"^{c.kind.__name__}: weight would have NaNs or infinities when merged"):
        layer.merge(safe_merge=True)
    assert not layer.merged and not model.is_lora_merged
    with pytest.raises(
        AttributeError, match=f"'{c.kind.__name__}' object has no attribute 'nothing', nor has the '{type(base).__name__}' inside it"
    ):
        layer.nothing  # noqa: B018


def test_a_broken_part_of_another_rank_is_found(nxd: Nxd) -> None:
    nxd(2, tp=2)
    _, layer = wrap(ColumnParallelLinear(8, 12))
    with torch.no_grad():
        layer.lora_B.weight.copy_(sharded.from_ranks(lambda r: torch.full((6, R), float("inf") if r == 1 else 0.0), ["tp"], 0))
    with pytest.raises(ValueError, match="LoraParallelLinear: weight would have NaNs or infinities"):
        layer.merge(safe_merge=True)


def test_bias_and_slices_pass_through(nxd: Nxd) -> None:
    nxd(2, tp=2)
    model, layer = wrap(ColumnParallelLinear(8, 12, gather_output=False, skip_bias_add=True))
    x = torch.randn(3, 8).to("xla")
    (out, bias), (base, _) = model(x), layer.base_layer(x)
    assert bias is layer.base_layer.bias and not torch.allclose(out.cpu(), base.cpu())
    chosen = torch.tensor([4, 1], device="xla")
    part, _ = layer(x, slice_indices=chosen)
    for s, w in zip(sharded.shards(part.detach()), sharded.shards(out.detach()), strict=True):
        torch.testing.assert_close(s, w[:, [4, 1]], rtol=1e-5, atol=1e-6)


def test_weights_that_are_held_transposed(nxd: Nxd) -> None:
    """Square parts, so that a product the wrong way round would fit."""
    nxd(2, tp=2)
    lora = LoraModel(
        nn.Sequential(SharedExperts(8, 8, 2, "silu", transpose_weights=True)).to("xla"),
        LoraConfig(lora_rank=R, target_modules=["gate_proj", "up_proj"]),
    )
    stir(lora)
    x = torch.randn(3, 8).to("xla")
    expected = full(lora(x))
    torch.testing.assert_close(full(lora.merge_and_unload()(x)), expected)


def test_the_input_may_have_a_name(nxd: Nxd) -> None:
    """That of the base layer, or x."""
    nxd(2, tp=2)
    x = torch.randn(3, 8)
    for base, device in ((nn.Linear(8, 6), "cpu"), (ColumnParallelLinear(8, 6, gather_output=False), "xla")):
        lora = LoraModel(nn.Sequential(base), LoraConfig(lora_rank=R, target_modules=["0"])).to(device)
        layer, own = lora.module[0], x.to(device)
        stir(lora)
        expected = full(layer(own))
        assert torch.equal(full(layer(input=own)), expected) and torch.equal(full(layer(x=own)), expected)
        with pytest.raises(TypeError, match="the input is missing: give it first, or as input="):
            layer(y=own)


def test_a_bfloat16_base_has_float32_adapters_and_bfloat16_results(nxd: Nxd) -> None:
    nxd(2, tp=2)
    model, layer = wrap(ColumnParallelLinear(8, 12, dtype=torch.bfloat16))
    assert layer.lora_A.weight.dtype == layer.lora_B.weight.dtype == torch.float32
    x = torch.randn(3, 8, dtype=torch.bfloat16).to("xla")
    out = model(x)
    base, update = layer.base_layer(x).float(), layer.lora_B(layer.lora_A(x.float()) * layer.scaling)
    assert out.dtype == torch.bfloat16 and torch.equal(out.cpu(), (base + update).bfloat16().cpu())
    before = full(layer.base_layer.weight)
    model.merge_lora()
    assert layer.base_layer.weight.dtype == torch.bfloat16
    model.unmerge_lora()
    assert torch.equal(full(layer.base_layer.weight), before)


def test_autocast(nxd: Nxd) -> None:
    nxd(2, tp=2)
    model, layer = wrap(ColumnParallelLinear(8, 12, gather_output=False))
    x = torch.randn(3, 8).to("xla")
    want = model(x).detach()
    with torch.autocast("xla", dtype=torch.bfloat16):
        out = model(x)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and layer.lora_A.weight.grad.dtype == torch.float32
    for found, exact in zip(sharded.shards(out.detach()), sharded.shards(want), strict=True):
        torch.testing.assert_close(found.float(), exact, rtol=0.05, atol=0.05)


def test_padding_for_inference(nxd: Nxd) -> None:
    nxd(4, tp=4)
    x = torch.randn(3, 8)
    for layer in (ColumnParallelLinear(8, 6, pad=True), RowParallelLinear(6, 8, pad=True)):
        base = full(layer.weight)
        model, adapted = wrap(layer)
        with pytest.raises(RuntimeError, match="pad=True is for inference"):
            model(x.to("xla"))
        model.eval()
        given = x if isinstance(layer, ColumnParallelLinear) else x[:, :6]
        bias = full(layer.bias)[: 6 if given is x else 8]  # type: ignore[arg-type]
        weight = (base + full(adapted.lora_B.weight) @ full(adapted.lora_A.weight) * ALPHA / R)[: len(bias), : given.shape[1]]
        torch.testing.assert_close(model(given.to("xla")).detach().cpu(), F.linear(given, weight, bias), rtol=1e-4, atol=1e-5)


def test_a_seed_gives_the_same_adapters_for_any_number_of_ranks(nxd: Nxd) -> None:
    found = []
    for tp in (1, 2, 4):
        nxd(4, tp=tp)
        torch.manual_seed(3)
        model = nn.Sequential(ColumnParallelLinear(8, 12, gather_output=False), RowParallelLinear(12, 8, input_is_parallel=True)).to("xla")
        lora = LoraModel(model, LoraConfig(lora_rank=R, target_modules=["0", "1"]))
        found.append([full(t) for n, t in lora.tensors().items() if "lora_" in n])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_how_factors_start() -> None:
    torch.manual_seed(0)
    for init, check in (("gaussian", lambda a: abs(a.std().item() * 16 - 1) < 0.1), ("default", lambda a: a.abs().max() <= 1 / 64**0.5)):
        config = LoraConfig(lora_rank=16, target_modules=["0", "1", "2"], init_lora_weights=init)
        lora = LoraModel(nn.Sequential(nn.Linear(64, 8), nn.Conv2d(4, 4, 4), nn.Embedding(64, 64)), config)
        layers = lora._layers
        for name in "01":
            assert check(layers[name].lora_A.weight) and not layers[name].lora_B.weight.any()
        assert not layers["2"].lora_A.weight.any() and abs(layers["2"].lora_B.weight.std().item() - 1) < 0.1


REFUSED = {
    "max_norm": (lambda: nn.Embedding(4, 4, max_norm=1.0), "max_norm"),
    "parallel max_norm": (lambda: ParallelEmbedding(4, 4, max_norm=1.0), "max_norm"),
    "groups": (lambda: nn.Conv2d(4, 4, 3, groups=2), "groups=2"),
    "partial rows": (lambda: RowParallelLinear(4, 4, reduce_output=False), "reduce_output=False"),
    "partial embedding": (lambda: ParallelEmbedding(4, 4, collect_output=False), "collect_output=False"),
    "padded columns": (lambda: ParallelEmbedding(4, 3, shard_across_embedding=True, pad=True), "shard_across_embedding and pad"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_cannot_be_adapted(nxd: Nxd, name: str) -> None:
    nxd(2, tp=2)
    make, fragment = REFUSED[name]
    with pytest.raises(NotImplementedError) as error:
        wrap(make())
    text = str(error.value)
    assert text.startswith("0: LoRA cannot adapt a") and fragment in text and "list it in modules_to_save" in text


def test_weights_on_meta() -> None:
    with pytest.raises(RuntimeError, match="^0: LoRA needs the weights of a Linear, which is on 'meta'"):
        LoraModel(nn.Sequential(nn.Linear(2, 2, device="meta")), LoraConfig(target_modules=["0"]))
