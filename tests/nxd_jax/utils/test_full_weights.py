"""Full tensors of shared parameters: out of what the ranks hold, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nxd_jax.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_jax.parallel_layers import parallel_state
from nxd_jax.parallel_layers.layers import (
    ColumnParallelLinear,
    InputChannelParallelConv2d,
    OutputChannelParallelConv2d,
    ParallelEmbedding,
    RowParallelLinear,
)
from nxd_jax.utils.full_weights import cut_full, gather_full, scatter_full
from tests.nxd_jax.conftest import Nxd
from torch_bridge.recorder import sharded

LAYERS = {
    "column": lambda: ColumnParallelLinear(6, 24, bias=False, keep_master_weight=True),
    "column_stride_2": lambda: ColumnParallelLinear(6, 24, bias=False, stride=2, keep_master_weight=True),
    "column_stride_3": lambda: ColumnParallelLinear(6, 24, bias=False, stride=3, keep_master_weight=True),
    "column_reordered": lambda: ColumnParallelLinear(6, 8, bias=False, rank_ordering=[2, 0, 3, 1], keep_master_weight=True),
    "row": lambda: RowParallelLinear(8, 6, bias=False, keep_master_weight=True),
    "row_stride_2": lambda: RowParallelLinear(16, 6, bias=False, stride=2, keep_master_weight=True),
    "bfloat16": lambda: ColumnParallelLinear(6, 8, bias=False, dtype=torch.bfloat16, keep_master_weight=True),
    "conv_out": lambda: OutputChannelParallelConv2d(3, 8, 3, keep_master_weight=True),
    "conv_in": lambda: InputChannelParallelConv2d(8, 3, 3, keep_master_weight=True),
}


@pytest.mark.core(keep=4)
@pytest.mark.parametrize("world, tp", [(8, 4), (4, 4), (1, 1)])
@pytest.mark.parametrize("name", LAYERS)
def test_full_weight_is_the_master_weight_and_comes_back(nxd: Nxd, name: str, world: int, tp: int) -> None:
    if name == "column_reordered" and tp == 1:
        pytest.skip("an ordering of four ranks")
    nxd(world, tp=tp)
    layer: Any = LAYERS[name]()
    layer.to("xla")
    weight = layer.weight
    before = sharded.varying(weight)
    full = gather_full(weight)
    assert isinstance(full, torch.Tensor) and full.dtype == weight.dtype and full.device.type == "cpu"
    assert torch.equal(full, layer.master_weight)
    other = torch.randn(full.shape)
    scatter_full(weight, other)
    assert layer.weight is weight and weight.tensor_model_parallel
    assert sharded.varying(weight) == before
    assert torch.equal(gather_full(weight), other.to(weight.dtype))


def test_embedding_rows_columns_and_padding(nxd: Nxd) -> None:
    nxd(4, tp=4)
    for kwargs, shape in ({}, (8, 6)), ({"shard_across_embedding": True}, (8, 8)), ({"pad": True}, (6, 5)):
        torch.manual_seed(1)
        layer = ParallelEmbedding(*shape, **kwargs)  # type: ignore[arg-type]
        torch.manual_seed(1)
        reference = torch.nn.init.normal_(torch.empty(shape))
        full = gather_full(layer.weight)
        if kwargs.get("pad"):
            reference = F.pad(reference, (0, 0, 0, 2))
        assert isinstance(full, torch.Tensor) and torch.equal(full, reference)


def test_biases(nxd: Nxd) -> None:
    nxd(4, tp=2)
    shared = ColumnParallelLinear(4, 6, gather_output=False)
    held = RowParallelLinear(4, 6)
    new = torch.arange(6.0)
    for layer in (shared, held):
        bias = layer.to("xla").bias
        assert bias is not None
        scatter_full(bias, new)
        assert torch.equal(gather_full(bias), new)  # type: ignore[arg-type]


def test_a_gradient_is_full_like_its_parameter(nxd: Nxd) -> None:
    nxd(8, tp=4)
    layer = ColumnParallelLinear(6, 24, bias=False, stride=2, gather_output=False, keep_master_weight=True)
    x = torch.randn(5, 6)
    (layer(x.to("xla")) ** 2).sum().backward()
    master = layer.master_weight.clone().requires_grad_()  # type: ignore[union-attr]
    (F.linear(x, master) ** 2).sum().backward()
    grad = layer.weight.grad
    assert grad is not None
    torch.testing.assert_close(gather_full(grad, like=layer.weight), master.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.core(keep=4)
@pytest.mark.parametrize("platform", ["trn1", "trn2"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("copies", [1, 2, 4])
def test_grouped_query_attention(nxd: Nxd, monkeypatch: pytest.MonkeyPatch, copies: int, fuse: bool, bias: bool, platform: str) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", platform)
    nxd(8, tp=4)
    layer = GQAQKVColumnParallelLinear(6, [16, 8], bias=bias, kv_size_multiplier=copies, fuse_qkv=fuse, keep_master_weight=True)
    masters = [getattr(layer, f"master_weight_{p}") for p in "qkv"]

    def full(kind: str) -> list[torch.Tensor]:
        return list(gather_full(getattr(layer, f"{kind}_qkv"))) if fuse else [gather_full(getattr(layer, f"{kind}_{p}")) for p in "qkv"]  # type: ignore[misc]

    assert all(torch.equal(a, b) for a, b in zip(full("weight"), masters, strict=True))
    for kind in ["weight", "bias"] if bias else ["weight"]:
        new = [torch.randn(n, *[6] * (kind == "weight")) for n in (16, 8, 8)]
        if fuse:
            scatter_full(getattr(layer, f"{kind}_qkv"), tuple(new))
        else:
            for p, value in zip("qkv", new, strict=True):
                scatter_full(getattr(layer, f"{kind}_{p}"), value)
        assert all(torch.equal(a, b) for a, b in zip(full(kind), new, strict=True))
    if not bias:
        x = torch.randn(3, 6)
        q, k, v = layer(x.to("xla"))
        for out, weight in zip((q, k, v), new, strict=True):
            reference = F.linear(x, weight)
            got = out.cpu()
            got = got if got.shape == reference.shape else _first_copies(got, copies, platform)
            torch.testing.assert_close(got, reference, rtol=1e-4, atol=1e-5)


def _first_copies(out: torch.Tensor, copies: int, platform: str) -> torch.Tensor:
    blocks = out.chunk(4, -1)
    return torch.cat(blocks[: 4 // copies] if platform == "trn1" else blocks[::copies], -1)


@pytest.mark.parametrize("fuse", [False, True])
def test_full_kv_weights_that_hold_their_copies(nxd: Nxd, fuse: bool) -> None:
    nxd(4, tp=4)
    layer = GQAQKVColumnParallelLinear(6, [16, 8], bias=False, kv_size_multiplier=2, fuse_qkv=fuse)
    q, k, v = (torch.randn(n, 6) for n in (16, 8, 8))
    if fuse:
        scatter_full(layer.weight_qkv, torch.cat([q, k, k, v, v]))
        assert torch.equal(torch.cat(gather_full(layer.weight_qkv)), torch.cat([q, k, v]))  # type: ignore[arg-type]
        scatter_full(layer.weight_qkv, torch.cat([q, v, k]))
        assert torch.equal(torch.cat(gather_full(layer.weight_qkv)), torch.cat([q, v, k]))  # type: ignore[arg-type]
    else:
        scatter_full(layer.weight_k, k.repeat(2, 1))
        assert torch.equal(gather_full(layer.weight_k), k)  # type: ignore[arg-type]


def test_a_layer_with_a_group_of_its_own(nxd: Nxd) -> None:
    nxd(4, tp=2)
    group = parallel_state.get_data_parallel_group()
    layer = ColumnParallelLinear(4, 6, bias=False, tensor_model_parallel_group=group, keep_master_weight=True)
    assert torch.equal(gather_full(layer.weight, group=group), layer.master_weight)  # type: ignore[arg-type]
    new = torch.randn(6, 4)
    scatter_full(layer.weight, new, group=group)
    assert torch.equal(gather_full(layer.weight, group=group, rank=3), new)  # type: ignore[arg-type]


def test_groups_with_different_values(nxd: Nxd) -> None:
    nxd(4, tp=2)
    layer = ColumnParallelLinear(4, 6, bias=False)
    parts = [torch.randn(3, 4) for _ in range(4)]
    layer.weight.data = sharded.from_ranks(parts.__getitem__)
    assert torch.equal(gather_full(layer.weight), torch.cat(parts[:2]))  # type: ignore[arg-type]
    assert torch.equal(gather_full(layer.weight, rank=2), torch.cat(parts[2:]))  # type: ignore[arg-type]
    full = [torch.randn(6, 4), torch.randn(6, 4)]
    scatter_full(layer.weight, lambda r: full[r // 2])
    assert torch.equal(gather_full(layer.weight, rank=1), full[0])  # type: ignore[arg-type]
    assert torch.equal(gather_full(layer.weight, rank=3), full[1])  # type: ignore[arg-type]


def test_a_part_by_itself(nxd: Nxd) -> None:
    nxd(4, tp=4)
    layer = RowParallelLinear(8, 6, bias=False, device="meta")
    full = torch.randn(6, 8)
    assert torch.equal(cut_full(layer.weight, full, 2), full[:, 4:6])


def test_errors(nxd: Nxd) -> None:
    nxd(4, tp=4)
    layer = ColumnParallelLinear(6, 8, bias=False)
    with pytest.raises(ValueError, match=r"hold \[2, 6\] each has the full shape \[8, 6\], got \[4, 6\]"):
        scatter_full(layer.weight, torch.zeros(4, 6))
    with pytest.raises(ValueError, match=r"takes one tensor, got 2"):
        scatter_full(layer.weight, (torch.zeros(4, 6), torch.zeros(4, 6)))
    with pytest.raises(ValueError, match=r"shape \[3\] is not shared out like a parameter of shape \[2, 6\]"):
        gather_full(torch.zeros(3, device="xla"), like=layer.weight)
    fused = GQAQKVColumnParallelLinear(6, [16, 8], bias=False)
    with pytest.raises(ValueError, match=r"takes the three tensors \(q, k, v\), got 1"):
        scatter_full(fused.weight_qkv, torch.zeros(3, 6))
    meta = ColumnParallelLinear(6, 8, bias=False, device="meta")
    with pytest.raises(RuntimeError, match=r"on 'meta' has no values yet: call its layer's init_weight_cpu\(\)"):
        gather_full(meta.weight)
    plain = torch.nn.Parameter(torch.zeros(2, 6))
    plain.tensor_model_parallel, plain.partition_dim, plain.num_partitions = True, 0, 4  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"is on cpu, and this process hosts several of them"):
        scatter_full(plain, torch.zeros(8, 6))
    plain.num_partitions = 3  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"in 3 parts, but its group has 4 ranks: pass the group of its layer"):
        gather_full(plain)
