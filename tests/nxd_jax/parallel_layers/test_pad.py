"""Padded attention heads: the model's results and gradients stay those of the unpadded, undivided one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nxd_jax.parallel_layers import parallel_state
from nxd_jax.parallel_layers.pad import generate_padding_mask, get_number_of_extra_heads, pad_model
from nxd_jax.utils.utils import hardware
from tests.nxd_jax.conftest import Nxd
from torch_bridge.recorder import sharded

HIDDEN, HEADS, HEAD_DIM = 12, 6, 2


class Attention(torch.nn.Module):
    def __init__(self, device: Any = None) -> None:
        from nxd_jax.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear

        super().__init__()
        tp = parallel_state.get_tensor_model_parallel_size()
        self.heads = (HEADS + get_number_of_extra_heads(HEADS, tp)) // tp
        self.qkv = ColumnParallelLinear(HIDDEN, 3 * HEADS * HEAD_DIM, stride=3, gather_output=False, device=device)
        self.out = RowParallelLinear(HEADS * HEAD_DIM, HIDDEN, input_is_parallel=True, device=device)
        self.split_size = HIDDEN

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, HEAD_DIM)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(torch.nn.Module):
    def __init__(self) -> None:
        from nxd_jax.parallel_layers.layers import ColumnParallelLinear

        super().__init__()
        self.attention = Attention()
        self.head = ColumnParallelLinear(HIDDEN, 28, gather_output=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x))


def same(t: torch.Tensor) -> torch.Tensor:
    parts = sharded.shards(t)
    assert all(torch.equal(p, parts[0]) for p in parts)
    return parts[0]


def test_padded_model_computes_the_same(nxd: Nxd) -> None:
    x = torch.randn(2, 5, HIDDEN)
    results = []
    for tp in (1, 4):
        nxd(4, tp=tp)
        torch.manual_seed(1)
        model = Attention()
        seen: list[Any] = []
        padded = pad_model(model, tp, HEADS, [Attention], lambda *given, seen=seen: seen.append(given))
        assert padded is model and seen == ([(model, 8 / 6)] if tp == 4 else [])
        model.to("xla")
        own = x.to("xla").requires_grad_()
        out = model(own)
        out.square().sum().backward()
        assert own.grad is not None
        results.append((same(out), same(own.grad)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_shapes_and_attributes(nxd: Nxd) -> None:
    nxd(4, tp=4)
    model = Block()
    before = model.head.weight
    pad_model(model, 4, HEADS, (Attention,))
    qkv, out = model.attention.qkv, model.attention.out
    assert qkv.weight.shape == (3 * 8 * HEAD_DIM // 4, HIDDEN) and qkv.bias.shape == (3 * 8 * HEAD_DIM // 4,)
    assert out.weight.shape == (HIDDEN, 8 * HEAD_DIM // 4) and out.bias.shape == (HIDDEN,)
    assert qkv.output_size == 48 and out.input_size == 16
    assert qkv.weight.tensor_model_parallel and qkv.weight.partition_dim == 0 and qkv.weight.partition_stride == 3
    assert model.head.weight is before
    rank3 = sharded.shards(qkv.weight)[3]
    assert not rank3.any()  # heads 6 and 7
    assert sharded.varying(qkv.weight).axes == ("tp",)


def test_meta(nxd: Nxd) -> None:
    nxd(4, tp=4)
    model = Attention(device="meta")
    pad_model(model, 4, HEADS)
    assert model.qkv.weight.device.type == "meta" and model.qkv.weight.shape == (12, HIDDEN) and model.out.weight.shape == (HIDDEN, 4)


def test_the_hook_without_classes_sees_every_module(nxd: Nxd) -> None:
    nxd(4, tp=4)
    model, seen = Attention(), []
    pad_model(model, 4, HEADS, pad_hook_fn=lambda module, ratio: seen.append((module, ratio)))
    assert seen == [(model.out, 8 / 6), (model.qkv, 8 / 6), (model, 8 / 6)]


def test_errors(nxd: Nxd) -> None:
    nxd(4, tp=4)
    with pytest.raises(
        ValueError, match=r"'head' \(ColumnParallelLinear\) has a sharded size of 28, no multiple of n_heads=6; name the attention"
    ):
        pad_model(Block(), 4, HEADS)
    with pytest.raises(ValueError, match="pad_model for tp_degree=32: the model is divided over 4"):
        pad_model(Block(), 32, HEADS)


@pytest.mark.parametrize(("heads", "tp", "extra"), [(6, 4, 2), (8, 4, 0), (25, 32, 7), (1, 1, 0), (3, 8, 5)])
def test_extra_heads(heads: int, tp: int, extra: int) -> None:
    assert get_number_of_extra_heads(heads, tp) == extra


def test_heads_for_no_ranks() -> None:
    with pytest.raises(ValueError, match="tp_degree=0.*at least 1"):
        get_number_of_extra_heads(6, 0)


@pytest.mark.parametrize("hardware", ["trn1", "trn2"])
@pytest.mark.parametrize(
    ("heads", "padded", "kv", "tp"), [(6, 8, 2, 4), (6, 8, 2, 2), (6, 8, 2, 8), (12, 16, 4, 2), (6, 8, 1, 4), (3, 8, 1, 8)]
)
def test_padding_mask(heads: int, padded: int, kv: int, tp: int, hardware: str) -> None:
    """Every rank's query heads are those of its K/V head; a group of query heads has its real ones first."""
    seen: dict[int, list[bool]] = {}
    for rank in range(tp):
        mask = generate_padding_mask(heads, padded, kv, tp, rank, hardware)
        assert mask.dtype == torch.bool and mask.shape == (padded // tp,)
        if kv >= tp:
            groups = range(rank * kv // tp, (rank + 1) * kv // tp)
        else:
            groups = range(rank % kv, rank % kv + 1) if hardware == "trn1" else range(rank * kv // tp, rank * kv // tp + 1)
        for group, part in zip(groups, mask.chunk(len(groups)), strict=True):
            seen.setdefault(group, []).extend(part.tolist())
    assert seen == {g: [True] * (heads // kv) + [False] * ((padded - heads) // kv) for g in range(kv)}


def test_padding_mask_of_several_ranks(nxd: Nxd) -> None:
    nxd(8, tp=4)
    mask = generate_padding_mask(6, 8, 2, 4, parallel_state.get_tensor_model_parallel_rank())
    assert mask.device.type == "xla"
    for rank, own in enumerate(sharded.shards(mask)):
        assert torch.equal(own, generate_padding_mask(6, 8, 2, 4, rank % 4))


def test_padding_mask_knows_hardware_by_name_and_member() -> None:
    for name, member in (("TRN1", hardware.TRN1), ("trn1n", hardware.TRN1), ("inf2", hardware.TRN1), ("trn2", hardware.TRN2)):
        assert torch.equal(generate_padding_mask(6, 8, 2, 4, 1, name), generate_padding_mask(6, 8, 2, 4, 1, member))
    assert torch.equal(generate_padding_mask(6, 8, 2, 4, 1), generate_padding_mask(6, 8, 2, 4, 1, "trn1"))


def test_padding_mask_errors() -> None:
    with pytest.raises(RuntimeError, match="Unexpected hardware_type 'trn999' in generate_padding_mask; use one of trn1, trn2"):
        generate_padding_mask(48, 64, 8, 32, 0, "trn999")
    with pytest.raises(ValueError, match="num_heads=7 must be a multiple of num_kv_heads=2"):
        generate_padding_mask(7, 8, 2, 4, 0)
    with pytest.raises(ValueError, match="num_heads_with_pad=8 must be a multiple of tp_degree=3"):
        generate_padding_mask(6, 8, 2, 3, 0)
