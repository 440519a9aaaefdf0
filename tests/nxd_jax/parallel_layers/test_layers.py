"""Parallel linear layers and embeddings: values, gradients, initial weights and attributes against the undivided layer."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from nxd_jax.modules.moe.routing import RouterTopK
from nxd_jax.modules.rms_norm import RMSNorm
from nxd_jax.parallel_layers import PARALLEL_MODULES, layers, mappings, parallel_state
from nxd_jax.parallel_layers.grads import get_grad_norm
from nxd_jax.parallel_layers.layer_norm import LayerNorm
from nxd_jax.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, SPMDRank
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import close, collectives_run, joined, own, per_rank, tp_place
from torch_bridge.mesh import world
from torch_bridge.recorder import sharded

ROOT = pathlib.Path(__file__).parents[3]
IN, OUT = 8, 24


def linear(seed: int = 3, bias: bool = True) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(IN, OUT, bias=bias)


def parallel(kind: Any, seed: int = 3, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    return kind(IN, OUT, **kwargs).to("xla")


def scattered_sequence(x: torch.Tensor, dim: int) -> torch.Tensor:
    """An xla leaf of which each tensor parallel rank has its part."""
    count = parallel_state.get_tensor_model_parallel_size()
    parts = x.chunk(count, dim)
    return own([parts[tp_place(r)] for r in range(world.size())], ["tp"]).requires_grad_()


# -- column ------------------------------------------------------------------------------------------

COLUMN = {
    "gather": dict(gather_output=True),
    "keep parallel": dict(gather_output=False),
    "no bias": dict(gather_output=False, bias=False),
    "stride 2": dict(gather_output=False, stride=2),
    "stride 3 gathered": dict(gather_output=True, stride=3),
    "ordering": dict(gather_output=False, rank_ordering=[2, 0, 3, 1]),
    "ordering gathered": dict(gather_output=True, rank_ordering=[2, 0, 3, 1]),
    "sequence": dict(gather_output=False, sequence_parallel_enabled=True, sequence_dimension=0),
    "sequence 1": dict(gather_output=False, sequence_parallel_enabled=True, sequence_dimension=1, stride=2),
    "reduce in double": dict(gather_output=True, reduce_dtype=torch.float64),
    "eval without gradient of the input": dict(gather_output=True),
}


@pytest.mark.core(keep=5)
@pytest.mark.parametrize("name", COLUMN)
def test_column(nxd: Nxd, name: str) -> None:
    nxd(8, tp=4)
    kwargs = COLUMN[name]
    reference, layer = linear(bias=kwargs.get("bias", True)), parallel(ColumnParallelLinear, **kwargs)
    stride, order = kwargs.get("stride", 1), kwargs.get("rank_ordering")
    x = torch.randn(4, 4, IN)
    expected = x.clone().requires_grad_()
    weights = torch.randn(4, 4, OUT)
    (reference(expected) * weights).sum().backward()

    dim = kwargs.get("sequence_dimension")
    given = x.to("xla").requires_grad_() if dim is None else scattered_sequence(x, dim)
    y = layer(given)
    if kwargs["gather_output"]:
        close(y, reference(x).detach())
        (y * weights.to("xla")).sum().backward()
    else:
        torch.testing.assert_close(joined(y, -1, stride, order), reference(x).detach(), rtol=1e-4, atol=1e-5)
        y.backward(parted(weights, -1, stride, order))
    assert expected.grad is not None
    grad = given.grad
    torch.testing.assert_close(joined(grad, dim) if dim is not None else per_rank(grad)[5], expected.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(joined(layer.weight, 0, stride, order), reference.weight.detach())
    torch.testing.assert_close(joined(layer.weight.grad, 0, stride, order), reference.weight.grad, rtol=1e-4, atol=1e-5)
    if layer.bias is not None:
        full = kwargs["gather_output"]
        bias_grad = per_rank(layer.bias.grad)[1] if full else joined(layer.bias.grad, 0, stride, order)
        torch.testing.assert_close(bias_grad, reference.bias.grad, rtol=1e-4, atol=1e-5)
        assert layer.bias.shape == ((OUT,) if full else (OUT // 4,))
        assert getattr(layer.bias, "tensor_model_parallel", False) is not full


def parted(full: torch.Tensor, dim: int, stride: int = 1, order: Any = None) -> torch.Tensor:
    """What each rank holds of a full tensor, by the definition of stride and ordering."""
    count = parallel_state.get_tensor_model_parallel_size()
    blocks = [b.chunk(count, dim) for b in full.chunk(stride, dim)]

    def part(rank: int) -> torch.Tensor:
        k = tp_place(rank) if order is None else order[tp_place(rank)]
        return torch.cat([b[k] for b in blocks], dim)

    return own([part(r) for r in range(world.size())])


# -- row ---------------------------------------------------------------------------------------------

ROW = {
    "scatter": dict(),
    "parallel": dict(input_is_parallel=True),
    "no bias": dict(bias=False),
    "stride 2": dict(stride=2),
    "stride 2 parallel": dict(stride=2, input_is_parallel=True),
    "ordering": dict(rank_ordering=[3, 1, 0, 2]),
    "ordering parallel": dict(rank_ordering=[3, 1, 0, 2], input_is_parallel=True),
    "sequence": dict(input_is_parallel=True, sequence_parallel_enabled=True, sequence_dimension=0),
    "sequence 1": dict(input_is_parallel=True, sequence_parallel_enabled=True, sequence_dimension=1),
    "reduce in double": dict(reduce_dtype=torch.float64, tile_cc=True),
}


@pytest.mark.core(keep=5)
@pytest.mark.parametrize("name", ROW)
def test_row(nxd: Nxd, name: str) -> None:
    nxd(8, tp=4)
    kwargs = ROW[name]
    reference, layer = linear(bias=kwargs.get("bias", True)), parallel(RowParallelLinear, **kwargs)
    stride, order, dim = kwargs.get("stride", 1), kwargs.get("rank_ordering"), kwargs.get("sequence_dimension")
    x = torch.randn(4, 4, IN)
    expected = x.clone().requires_grad_()
    weights = torch.randn(4, 4, OUT)
    (reference(expected) * weights).sum().backward()

    split = kwargs.get("input_is_parallel", False)
    given = parted(x, -1, stride, order).requires_grad_() if split else x.to("xla").requires_grad_()
    y = layer(given)
    if dim is None:
        close(y, reference(x).detach())
        (y * weights.to("xla")).sum().backward()
    else:
        torch.testing.assert_close(joined(y, dim), reference(x).detach(), rtol=1e-4, atol=1e-5)
        y.backward(scattered_sequence(weights, dim).detach())
    grad = joined(given.grad, -1, stride, order) if split else per_rank(given.grad)[6]
    torch.testing.assert_close(grad, expected.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(joined(layer.weight, 1, stride, order), reference.weight.detach())
    torch.testing.assert_close(joined(layer.weight.grad, 1, stride, order), reference.weight.grad, rtol=1e-4, atol=1e-5)
    if layer.bias is not None:
        assert layer.bias.sequence_parallel_enabled is (dim is not None)
        bias_grad = sum(per_rank(layer.bias.grad)[:4]) if dim is not None else per_rank(layer.bias.grad)[2]
        torch.testing.assert_close(bias_grad, reference.bias.grad, rtol=1e-4, atol=1e-5)


def test_row_without_the_sum(nxd: Nxd) -> None:
    nxd(4, tp=4)
    layer = parallel(RowParallelLinear, reduce_output=False, bias=False)
    x = torch.randn(2, 3, IN)
    y = layer(x.to("xla"))
    torch.testing.assert_close(sum(per_rank(y)), linear(bias=False)(x).detach(), rtol=1e-4, atol=1e-5)


def test_row_with_sequence_parallelism_needs_parallel_input(nxd: Nxd) -> None:
    nxd(4, tp=4)
    with pytest.raises(RuntimeError, match="input_is_parallel must be True"):
        RowParallelLinear(IN, OUT, sequence_parallel_enabled=True)
    layer = ColumnParallelLinear(IN, OUT, sequence_parallel_enabled=True, sequence_dimension=0)
    with pytest.raises(AssertionError, match="gather_output=True cannot be combined"):
        layer(torch.zeros(1, 1, IN, device="xla"))


# -- what both have ------------------------------------------------------------------------------------


def test_skip_bias_add(nxd: Nxd) -> None:
    nxd(4, tp=4)
    x = torch.randn(2, 3, IN)
    without = F.linear(x, linear().weight).detach()
    for kind, kwargs in ((ColumnParallelLinear, {}), (RowParallelLinear, {})):
        y, bias = parallel(kind, skip_bias_add=True, **kwargs)(x.to("xla"))
        close(y, without)
        close(bias, linear().bias.detach())


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear, ParallelEmbedding])
def test_one_seed_gives_the_same_weights_for_every_tp(nxd: Nxd, kind: Any, tp: int) -> None:
    nxd(4, tp=tp)
    torch.manual_seed(7)
    init = torch.nn.init.xavier_normal_
    layer = kind(IN, OUT, init_method=init)
    torch.manual_seed(7)
    full = init(torch.empty((IN, OUT) if kind is ParallelEmbedding else (OUT, IN)))
    weight = joined(layer.weight.to("xla"), layer.weight.partition_dim)
    assert torch.equal(weight, full)
    assert layer.weight.device.type == ("cpu" if tp == 1 else "xla")
    if kind is not ParallelEmbedding:
        assert not layer.bias.any()


def test_bfloat16(nxd: Nxd) -> None:
    nxd(4, tp=4)
    layer, x = parallel(ColumnParallelLinear, dtype=torch.bfloat16, gather_output=False), torch.randn(2, 3, IN).bfloat16()
    reference = linear().bfloat16()
    given, expected = x.to("xla").requires_grad_(), x.clone().requires_grad_()
    y = layer(given)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(joined(y, -1), reference(x).detach(), rtol=2e-2, atol=2e-2)
    y.sum().backward()
    reference(expected).sum().backward()
    close(given.grad, expected.grad, rtol=2e-2, atol=2e-2)
    assert given.grad.dtype == layer.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_autocast(nxd: Nxd, kind: Any) -> None:
    nxd(4, tp=4)
    layer, reference = parallel(kind), linear()
    x = torch.randn(2, 3, IN)
    with torch.autocast("xla", dtype=torch.bfloat16):
        y = layer(x.to("xla"))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    reference(x).sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(joined(layer.weight.grad, layer.weight.partition_dim), reference.weight.grad, rtol=2e-2, atol=2e-2)


def test_frozen_weight_and_input_without_gradient(nxd: Nxd) -> None:
    nxd(4, tp=4)
    layer, x = parallel(ColumnParallelLinear), torch.randn(2, 3, IN).to("xla")
    layer.weight.requires_grad_(False)
    layer(x.requires_grad_()).sum().backward()
    assert layer.weight.grad is None
    layer.weight.requires_grad_(True)
    layer(x.detach()).sum().backward()
    assert joined(layer.weight.grad, 0).shape == (OUT, IN)


def test_slice_indices(nxd: Nxd) -> None:
    nxd(4, tp=4)
    layer, x = parallel(ColumnParallelLinear, gather_output=False), torch.randn(2, 3, IN)
    y = layer(x.to("xla"), slice_indices=torch.tensor([1, 4], device="xla"))
    expected = linear()(x).detach()
    for r in range(4):
        torch.testing.assert_close(per_rank(y)[r], expected[..., [6 * r + 1, 6 * r + 4]], rtol=1e-4, atol=1e-5)


def test_attributes(nxd: Nxd) -> None:
    nxd(4, tp=4)
    column = ColumnParallelLinear(IN, OUT, stride=2, gather_output=False, keep_master_weight=True, rank_ordering=[0, 1, 3, 2])
    row = RowParallelLinear(IN, OUT)
    w = column.weight
    assert (w.tensor_model_parallel, w.partition_dim, w.partition_stride, w.num_partitions) == (True, 0, 2, 4)
    assert w.rank_ordering == [0, 1, 3, 2]
    assert column.bias is not None
    assert (column.bias.tensor_model_parallel, column.bias.partition_dim) == (True, 0)
    assert (row.weight.partition_dim, row.weight.partition_stride, row.weight.rank_ordering) == (1, 1, None)
    assert not hasattr(row.bias, "tensor_model_parallel")
    assert column.master_weight is not None
    assert torch.equal(column.master_weight, joined(w, 0, 2, [0, 1, 3, 2]))
    assert (column.output_size_per_partition, row.input_size_per_partition) == (6, 2)
    assert column.tensor_parallel_group.size() == 4
    assert list(column.state_dict()) == ["weight", "bias"]
    column.to("xla")
    assert w is column.weight and w.tensor_model_parallel
    assert ColumnParallelLinear in PARALLEL_MODULES
    assert "tp=4" in repr(column)


def test_meta_until_init_weight_cpu(nxd: Nxd) -> None:
    nxd(4, tp=4)
    layer = ColumnParallelLinear(IN, OUT, device="meta", gather_output=False)
    weight = layer.weight
    assert weight.is_meta and weight.shape == (6, IN) and layer.bias is not None and layer.bias.is_meta
    torch.manual_seed(3)
    layer.init_weight_cpu()
    assert layer.weight is weight and weight.tensor_model_parallel
    assert torch.equal(joined(weight, 0), linear().weight.detach())
    assert torch.equal(joined(layer.bias, 0), linear().bias.detach())
    torch.manual_seed(4)
    layer.init_weight_cpu()  # again, now that it is on xla
    assert layer.weight is weight
    assert torch.equal(joined(weight, 0), linear(4).weight.detach())
    row = RowParallelLinear(IN, OUT, device="meta")
    row.to_empty(device="cpu")
    torch.manual_seed(3)
    row.init_weight_cpu()
    assert torch.equal(joined(row.weight, 1), linear().weight.detach())
    assert torch.equal(row.bias.detach().cpu(), linear().bias.detach())


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("device", ["meta", "xla"])
def test_default_devices(nxd: Nxd, device: str, tp: int) -> None:
    """`with torch.device(...)` around a model is where weights go that are made without saying where."""
    nxd(4, tp=tp)
    torch.manual_seed(3)
    with torch.device(device):
        column = ColumnParallelLinear(IN, OUT)
        others = [RowParallelLinear(IN, OUT), ParallelEmbedding(16, IN), layers.OutputChannelParallelConv2d(4, 8, 3)]
        number = SPMDRank(tp)
    assert {p.device.type for layer in (column, *others) for p in layer.parameters()} == {device}
    assert [int(r) for r in sharded.shards(number.rank.to("xla"))] == [r % tp for r in range(4)]
    if device == "meta":
        torch.manual_seed(3)
        column.init_weight_cpu()
        assert {p.device.type for p in column.parameters()} <= {"cpu", "xla"}
    assert torch.equal(joined(column.to("xla").weight, 0), linear().weight.detach())
    assert torch.equal(column.bias.detach().cpu(), linear().bias.detach())


def test_names_of_what_layers_hold(nxd: Nxd) -> None:
    nxd(4, tp=4)
    rows, columns = ParallelEmbedding(16, 8, init_method=torch.nn.init.ones_), ParallelEmbedding(16, 8, shard_across_embedding=True)
    assert (rows.weight_partition_dim, rows.per_partition_size, rows.tensor_model_parallel_size) == (0, 4, 4)
    assert (columns.weight_partition_dim, columns.per_partition_size, rows.init_method) == (1, 2, torch.nn.init.ones_)
    conv = layers.InputChannelParallelConv2d(4, 8, 3, keep_master_weight=True)
    assert conv.partition_dim == layers.CONV_KERNEL_INPUT_CHANNEL_DIMENSION and conv.keep_master_params


def test_assigned_weights_stay_marked(nxd: Nxd) -> None:
    """`load_state_dict(assign=True)` puts other parameters in the place of those that say how ranks share them; the gradient norm asks them."""
    nxd(4, tp=4)
    model = torch.nn.ModuleDict(
        {
            "column": ColumnParallelLinear(IN, OUT, bias=False, gather_output=False),
            "row": RowParallelLinear(OUT, IN, input_is_parallel=True, sequence_parallel_enabled=True, sequence_dimension=0),
            "norm": LayerNorm(IN, sequence_parallel_enabled=True),
            "rms": RMSNorm(IN, sequence_parallel_enabled=True),
            "router": RouterTopK(4, 2, IN, sequence_parallel_enabled=True, sequence_dimension=0),
        }
    ).to("xla")
    before = dict(model.named_parameters())
    model.load_state_dict({name: p.detach().clone() for name, p in before.items()}, assign=True)
    for name, p in model.named_parameters():
        assert p is not before[name]
        for mark in ("tensor_model_parallel", "partition_dim", "num_partitions", "sequence_parallel_enabled"):
            assert getattr(p, mark, None) == getattr(before[name], mark, None), (name, mark)
    column = model["column"].weight
    column.grad = column.detach().clone()
    assert float(get_grad_norm([column])) == pytest.approx(float(joined(column, 0).norm()), rel=1e-6)


@pytest.mark.parametrize("tp", [1, 2])
def test_weights_given_as_cpu_tensors(nxd: Nxd, tp: int) -> None:
    """What inference samples do: each rank cuts its part out of a CPU tensor, and gives it to a layer that is on the CPU there."""
    nxd(tp, tp=tp)
    full = torch.arange(float(IN * OUT)).view(OUT, IN) / 100
    rank, part = parallel_state.get_tensor_model_parallel_rank(), OUT // tp
    column = ColumnParallelLinear(IN, OUT, bias=False, gather_output=False)
    column.weight.data = full[part * rank : part * (rank + 1)].clone()
    column.weight.data = column.weight.data  # its own, again
    assert torch.equal(joined(column.weight.detach().to("xla"), 0).cpu(), full)
    row = RowParallelLinear(OUT, IN, bias=False, input_is_parallel=True)
    row.weight.data = full.t()[:, part * rank : part * (rank + 1)].clone()
    mlp = torch.nn.Sequential(column, row).to("xla")
    x = torch.ones(3, IN)
    torch.testing.assert_close(mlp(x.to("xla")).cpu().detach(), x @ full.t() @ full)
    with pytest.raises(
        TypeError, match=r"cannot set \.data of a tensor on xla:0 to a tensor on cpu"
    ):  # now they are on xla for the script, too
        column.weight.data = torch.zeros(part, IN)


def test_custom_group(nxd: Nxd) -> None:
    nxd(8, tp=4)
    group = parallel_state.create_pg_with_ranks([0, 4])
    layer = parallel(ColumnParallelLinear, tensor_model_parallel_group=group)
    assert layer.weight.shape == (OUT // 2, IN) and layer.weight.num_partitions == 2
    x = torch.randn(2, 3, IN)
    close(layer(x.to("xla")), linear()(x).detach())


def test_sizes_that_do_not_divide(nxd: Nxd) -> None:
    nxd(4, tp=4)
    with pytest.raises(AssertionError, match=r"10 is not divisible by 4: ColumnParallelLinear's output_size .*pad=True"):
        ColumnParallelLinear(4, 10)
    with pytest.raises(AssertionError, match=r"10 is not divisible by 4: RowParallelLinear's input_size"):
        RowParallelLinear(10, 4)
    with pytest.raises(AssertionError, match=r"10 is not divisible by 4: ParallelEmbedding's num_embeddings"):
        ParallelEmbedding(10, 4)
    with pytest.raises(AssertionError, match=r"6 is not divisible by 4: ParallelEmbedding's embedding_dim"):
        ParallelEmbedding(10, 6, shard_across_embedding=True)
    with pytest.raises(ValueError, match=r"rank_ordering=\[0, 0, 1, 2\] must name each of the shards 0..3 once"):
        ColumnParallelLinear(4, 8, rank_ordering=[0, 0, 1, 2])


def test_padding(nxd: Nxd) -> None:
    nxd(4, tp=4)
    torch.manual_seed(3)
    column = ColumnParallelLinear(10, 10, pad=True, pad_alignment_size_per_rank=2).to("xla")
    torch.manual_seed(3)
    kept = ColumnParallelLinear(10, 10, pad=True, keep_padded_output=True).to("xla").eval()
    torch.manual_seed(3)
    row = RowParallelLinear(10, 10, pad=True).to("xla").eval()
    torch.manual_seed(3)
    reference = torch.nn.Linear(10, 10)
    x = torch.randn(2, 3, 10)
    with pytest.raises(RuntimeError, match=r"call model.eval\(\)"):
        column(x.to("xla"))
    assert (column.output_size, column.pad_size, kept.output_size, row.input_size) == (16, 6, 12, 12)
    close(column.eval()(x.to("xla")), reference(x).detach())
    close(kept(x.to("xla"))[..., :10], reference(x).detach())
    assert kept(x.to("xla")).shape == (2, 3, 12)
    close(row(x.to("xla")), reference(x).detach())
    state = {"w": torch.ones(10, 10), "bias": torch.ones(10), "bad": torch.ones(9, 10)}
    column.preshard_hook(state, "w")
    assert state["w"].shape == (16, 10) and not state["w"][10:].any()
    column.preshard_hook(state, "bias")
    assert state["bias"].tolist() == [1.0] * 10 + [torch.finfo(torch.float32).min] * 6
    state["bias"] = torch.ones(10)
    row.preshard_hook(state, "bias")
    assert state["bias"].shape == (10,)  # its inputs are padded, not its outputs
    with pytest.raises(RuntimeError, match="bad has 9 entries along dim 0"):
        column.preshard_hook(state, "bad")


def test_the_embedding_has_the_names_of_the_original(nxd: Nxd) -> None:
    nxd(4, tp=2)
    table = ParallelEmbedding(8, 2, sequence_parallel_enabled=True, sequence_dimension=1)
    assert table.tensor_model_parallel_group is table.tensor_parallel_group is parallel_state.get_tensor_model_parallel_group()
    assert table.sequence_dim == 1 and ParallelEmbedding(8, 2).sequence_dim is None


def test_create_local_weight(nxd: Nxd) -> None:
    nxd(4, tp=2)
    full = torch.arange(24.0).reshape(12, 2)
    local = layers.create_local_weight(full, 0, 6, 3)
    assert torch.equal(per_rank(local)[2], full[[0, 1, 4, 5, 8, 9]])
    assert torch.equal(per_rank(local)[3], full[[2, 3, 6, 7, 10, 11]])
    out = torch.zeros(12, 1, device="xla")
    assert layers.create_local_weight(full, 1, 1, 1, out) is out
    assert torch.equal(per_rank(out)[1], full[:, 1:])


@pytest.mark.parametrize(("dim", "per_partition", "stride"), [(0, 6, 1), (0, 6, 3), (1, 2, 1), (-1, 2, 2)])
def test_create_local_weight_of_one_on_xla(nxd: Nxd, dim: int, per_partition: int, stride: int) -> None:
    nxd(4, tp=2)
    full = torch.nn.Linear(4, 12, device="xla").weight
    local = layers.create_local_weight(full, dim, per_partition, stride)
    expected = layers.create_local_weight(full.detach().cpu(), dim, per_partition, stride)
    assert not local.requires_grad and sharded.varying(local) == sharded.varying(expected)
    assert all(torch.equal(a, b) for a, b in zip(per_rank(local), per_rank(expected), strict=True))


def test_without_initialisation_one_rank_holds_all() -> None:
    parallel_state.destroy_model_parallel()
    world.configure(world.World(1))
    try:
        with pytest.warns(UserWarning, match=r"before parallel_state.initialize_model_parallel"):
            layer = ColumnParallelLinear(IN, OUT)
        assert layer.weight.shape == (OUT, IN)
        x = torch.randn(2, 3, IN)
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
        torch.testing.assert_close(
            layer.to("xla")(x.to("xla")).cpu(), F.linear(x, layer.weight.cpu(), layer.bias.cpu()), rtol=1e-4, atol=1e-5
        )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        world.configure(None)


# -- embeddings ----------------------------------------------------------------------------------------

ROWS, WIDTH = 16, 8
EMBEDDING = {
    "rows": dict(),
    "columns": dict(shard_across_embedding=True),
    "padding row 0": dict(padding_idx=0),
    "padding row -3": dict(padding_idx=-3, shard_across_embedding=True),
    "scaled": dict(scale_grad_by_freq=True),
    "scaled columns": dict(scale_grad_by_freq=True, shard_across_embedding=True),
    "max norm": dict(max_norm=2.0),
    "max norm columns": dict(max_norm=2.0, norm_type=3.0, shard_across_embedding=True),
    "max norm inf": dict(max_norm=1.0, norm_type=float("inf"), shard_across_embedding=True),
    "ordering": dict(rank_ordering=[1, 3, 2, 0]),
    "ordering columns": dict(rank_ordering=[1, 3, 2, 0], shard_across_embedding=True),
    "spmd": dict(use_spmd_rank=True, tile_cc=True),
}
NATIVE = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")


@pytest.mark.core(keep=8)
@pytest.mark.parametrize("name", EMBEDDING)
@pytest.mark.parametrize("tp", [1, 4])
def test_embedding(nxd: Nxd, name: str, tp: int) -> None:
    nxd(8, tp=tp)
    kwargs = EMBEDDING[name]
    if tp == 1:
        kwargs = {**kwargs, "rank_ordering": None}
    torch.manual_seed(2)
    reference = torch.nn.Embedding(ROWS, WIDTH, **{k: v for k, v in kwargs.items() if k in NATIVE})
    torch.manual_seed(2)
    layer = ParallelEmbedding(ROWS, WIDTH, **kwargs).to("xla")
    ids = torch.tensor([[0, 1, 1, 15, 13], [7, 0, 13, 13, 2]])
    weights = torch.randn(2, 5, WIDTH)
    expected = reference(ids)
    (expected * weights).sum().backward()
    y = layer(ids.to("xla"))
    close(y, expected.detach())
    (y * weights.to("xla")).sum().backward()
    order = kwargs.get("rank_ordering")
    torch.testing.assert_close(joined(layer.weight, layer.weight.partition_dim, order=order), reference.weight.detach())
    torch.testing.assert_close(
        joined(layer.weight.grad, layer.weight.partition_dim, order=order), reference.weight.grad, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("dim", [None, 1])
def test_embedding_for_sequence_parallelism(nxd: Nxd, columns: bool, dim: int | None) -> None:
    nxd(4, tp=4)
    torch.manual_seed(2)
    reference = torch.nn.Embedding(ROWS, WIDTH)
    torch.manual_seed(2)
    layer = ParallelEmbedding(ROWS, WIDTH, shard_across_embedding=columns, sequence_parallel_enabled=True, sequence_dimension=dim).to("xla")
    ids = torch.randint(ROWS, (3, 8))
    weights = torch.randn(3, 8, WIDTH)
    expected = reference(ids)
    (expected * weights).sum().backward()
    y = layer(ids.to("xla"))
    laid, at = (expected, 1) if dim else (expected.transpose(0, 1), 0)
    torch.testing.assert_close(joined(y, at), laid.detach())
    y.backward(scattered_sequence(weights if dim else weights.transpose(0, 1).contiguous(), at).detach())
    torch.testing.assert_close(joined(layer.weight.grad, layer.weight.partition_dim), reference.weight.grad, rtol=1e-4, atol=1e-5)


def test_embedding_that_does_not_divide_is_padded(nxd: Nxd) -> None:
    nxd(4, tp=4)
    ids = torch.tensor([[0, 9, 3]])
    for columns in (False, True):
        torch.manual_seed(2)
        layer = ParallelEmbedding(10, 6, pad=True, shard_across_embedding=columns).to("xla")
        torch.manual_seed(2)
        close(layer(ids.to("xla")), torch.nn.Embedding(10, 6)(ids).detach())
        assert layer.weight.shape == ((10, 2) if columns else (3, 6))


def test_embedding_parts(nxd: Nxd) -> None:
    nxd(4, tp=4)
    torch.manual_seed(2)
    layer = ParallelEmbedding(ROWS, WIDTH, collect_output=False, use_spmd_rank=True).to("xla")
    y = layer(torch.tensor([5], device="xla"))
    assert [bool(p.any()) for p in per_rank(y)] == [False, True, False, False]
    assert (layer.num_embeddings_per_partition, int(layer.start_index), int(layer.end_index)) == (4, 0, 4)
    assert layer.rank_util is not None
    assert [p.tolist() for p in per_rank(layer.rank_util.get_rank())] == [[0], [1], [2], [3]]
    with pytest.raises(NotImplementedError, match="gradients on xla are dense"):
        ParallelEmbedding(ROWS, WIDTH, sparse=True)
    with pytest.raises(AssertionError, match="padding_idx=16 must be within"):
        ParallelEmbedding(ROWS, WIDTH, padding_idx=16)


def test_tied_embedding(nxd: Nxd) -> None:
    """A language model's head that shares the embedding's weight."""
    nxd(4, tp=4)
    torch.manual_seed(2)
    embedding, head = ParallelEmbedding(ROWS, WIDTH), ColumnParallelLinear(WIDTH, ROWS, bias=False)
    head.weight = embedding.weight
    model = torch.nn.ModuleList([embedding, head]).to("xla")
    assert head.weight is embedding.weight
    torch.manual_seed(2)
    table = torch.nn.Embedding(ROWS, WIDTH)
    ids = torch.tensor([[1, 2, 15]])
    (table(ids) @ table.weight.t()).square().sum().backward()
    head(embedding(ids.to("xla"))).square().sum().backward()
    torch.testing.assert_close(joined(embedding.weight.grad, 0), table.weight.grad, rtol=1e-4, atol=1e-4)
    assert len(list(model.parameters())) == 1


def test_spmd_rank(nxd: Nxd) -> None:
    nxd(8, tp=4)
    rank = SPMDRank(world_size=4).to("xla")
    assert [int(p) for p in per_rank(rank())] == [0, 1, 2, 3] * 2
    assert rank.rank.dtype == torch.int32 and rank.rank.num_partitions == 4
    state: dict[str, Any] = {}
    rank.preshard_hook(state, "rank")
    assert state["rank"].tolist() == [0, 1, 2, 3]


# -- blocks ----------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, sequence: bool):
        super().__init__()
        more: dict[str, Any] = dict(sequence_parallel_enabled=sequence, sequence_dimension=0)
        self.norm = LayerNorm(IN, sequence_parallel_enabled=sequence)
        self.up = ColumnParallelLinear(IN, OUT, gather_output=False, **more)
        self.down = RowParallelLinear(OUT, IN, input_is_parallel=True, **more)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("sequence", [False, True])
def test_collectives_of_an_mlp_block(nxd: Nxd, sequence: bool) -> None:
    """Megatron's: one all-reduce each way; with sequence parallelism a gather and a scatter each way, and the input gathered again."""
    nxd(8, tp=4)
    block = Block(sequence).to("xla")
    whole = torch.randn(8, 2, IN)
    x = scattered_sequence(whole, 0) if sequence else whole.to("xla").requires_grad_()
    y = block(x)
    assert collectives_run() == ({"all_gather": 1, "reduce_scatter": 1} if sequence else {"all_reduce": 1})
    y.backward(torch.ones_like(y))
    assert collectives_run() == ({"all_gather": 2, "reduce_scatter": 1} if sequence else {"all_reduce": 1})
    assert sharded.varying(y).axes == (("tp",) if sequence else ())
    assert block.norm.weight.sequence_parallel_enabled is sequence


def test_a_sequence_parallel_block_trains_like_the_whole(nxd: Nxd) -> None:
    nxd(8, tp=4)
    torch.manual_seed(5)
    block = Block(True).to("xla")
    nxd(8, tp=1)
    torch.manual_seed(5)
    reference = Block(False)
    whole = torch.randn(8, 2, IN)
    reference(whole).square().sum().backward()
    expected = {n: p.grad for n, p in reference.named_parameters()}
    nxd(8, tp=4)
    torch.manual_seed(5)
    block = Block(True).to("xla")
    mappings.gather_from_sequence_parallel_region(block(scattered_sequence(whole, 0)), to_model_parallel=False).square().sum().backward()
    for name, parameter in block.named_parameters():
        if getattr(parameter, "tensor_model_parallel", False):
            grad = joined(parameter.grad, parameter.partition_dim)
        else:
            grad = sum(per_rank(parameter.grad)[:4])
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-4, msg=name)


def test_layer_norm() -> None:
    norm = LayerNorm(6, eps=1e-3, bias=False, sequence_parallel_enabled=True)
    assert norm.bias is None and norm.weight.sequence_parallel_enabled and norm.eps == 1e-3
    plain = LayerNorm(6, elementwise_affine=False)
    x = torch.randn(2, 6)
    torch.testing.assert_close(plain(x), F.layer_norm(x, (6,)))


# -- one rank per process --------------------------------------------------------------------------------

SCRIPT = """
import sys, torch, torch.distributed as dist
import torch_bridge.torch_xla.distributed.xla_backend
from nxd_jax.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_jax.parallel_layers import layers, parallel_state, random
from torch_bridge.recorder import sharded

dist.init_process_group("xla")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
torch.manual_seed(1)
embedding = layers.ParallelEmbedding(10, 16)
column = layers.ColumnParallelLinear(16, 32, gather_output=False)
row = layers.RowParallelLinear(32, 16, input_is_parallel=True)
qkv = GQAQKVColumnParallelLinear(16, [8, 4], kv_size_multiplier=2)
model = torch.nn.Sequential(embedding, column, row, qkv).to("xla")
random.model_parallel_xla_manual_seed(3)
with random.get_xla_rng_tracker().fork():
    noise = torch.rand(3, device="xla")
sum(t.square().sum() for t in model(torch.tensor([[1, 9, 4]], device="xla"))).backward()
torch.optim.AdamW(model.parameters(), lr=0.1).step()
for p in model.parameters():
    assert sharded.varying(p).axes == (("tp",) if getattr(p, "tensor_model_parallel", False) else ()), sharded.varying(p)
found = [noise, *model.parameters(), *(p.grad for p in model.parameters())]
torch.save([sharded.shards(t.detach()) for t in found], sys.argv[1] + str(dist.get_rank()))
"""


@pytest.mark.thorough
def test_processes_of_one_rank_give_what_one_process_gives(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'aliases'}", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for command, extra in ((launch, {}), ([sys.executable], {"NEURON_RT_NUM_CORES": "2"})):
        target = str(tmp_path / ("hosted" if extra else "alone"))
        done = subprocess.run([*command, str(script), target], env=env | extra, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    hosted = torch.load(tmp_path / "hosted0")
    for rank in range(2):
        for (mine,), ours in zip(torch.load(tmp_path / f"alone{rank}"), hosted, strict=True):
            torch.testing.assert_close(mine, ours[rank], rtol=1e-5, atol=1e-6)
