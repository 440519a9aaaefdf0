"""Fused linear layers of experts: who holds what, initial values, attributes, the optimizer's step, and mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jax.sharding import PartitionSpec
from torch import optim

import torch_bridge.torch_xla.core.xla_model as xm
from nxd_jax.modules.lora import LoraConfig, LoraModel
from nxd_jax.modules.moe.grouped_product import grouped_product
from nxd_jax.modules.moe.moe_parallel_layers import (
    ExpertFusedColumnParallelLinear,
    ExpertFusedLinear,
    ExpertFusedLinearWithAsyncCommunication,
    ExpertFusedRowParallelLinear,
)
from nxd_jax.optimizer import NeuronEPZero1Optimizer
from nxd_jax.tensor_parallel import grads, layer_groups, parallel_groups, regions, sharded_weights
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from nxd_jax.utils import model_utils
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.modules.moe import two_processes
from tests.nxd_jax.modules.moe.expert_parts import LAYOUTS, by_expert_rank, held_by, of_expert_ranks, whole
from tests.nxd_jax.parallel_layers.parts import own, per_rank
from torch_bridge.mesh import stacked_arrays, world
from torch_bridge.recorder import sharded
from torch_bridge.runtime import executor

ROOT = Path(__file__).parents[4]
E, IN, OUT = 8, 8, 16
KINDS = {ExpertFusedColumnParallelLinear: 2, ExpertFusedRowParallelLinear: 1}
"""Layers and the dim of their weight that tensor parallel ranks share out."""


def make(kind: Any, **kwargs: Any) -> Any:
    torch.manual_seed(7)
    return kind(E, IN, OUT, bias=True, **kwargs)


def by_hand(init: Any = sharded_weights.default_init) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight and bias of all experts, one expert after the other."""
    torch.manual_seed(7)
    weight = torch.stack([init(torch.empty(IN, OUT)) for _ in range(E)])
    return weight, torch.nn.init.uniform_(torch.empty(E, OUT), -(IN**-0.5), IN**-0.5)


# -- initial values ----------------------------------------------------------------------------------


@pytest.mark.core(keep=4)
@pytest.mark.parametrize("tp, ep", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_seed_gives_the_same_experts_for_every_layout(nxd: Nxd, kind: Any, tp: int, ep: int) -> None:
    nxd(8, tp=tp, ep=ep)
    layer, (weight, bias) = make(kind), by_hand()
    column = kind is ExpertFusedColumnParallelLinear
    assert layer.weight.device.type == ("cpu" if tp == ep == 1 else "xla")
    assert layer.bias.device.type == ("xla" if ep > 1 or (column and tp > 1) else "cpu")
    layer.to("xla")
    assert torch.equal(whole(layer.weight, KINDS[kind]), weight)
    assert torch.equal(whole(layer.bias, 1 if column else None), bias)
    assert len({float(t.sum()) for t in of_expert_ranks_any(layer.weight)}) == ep


def of_expert_ranks_any(t: torch.Tensor) -> list[torch.Tensor]:
    """One rank's value for each place along ep."""
    places, shards = parallel_groups.places("ep"), per_rank(t)
    return [next(shards[r] for r in range(len(shards)) if places[r] == e) for e in range(parallel_groups.size("ep"))]


def test_fused_weights(nxd: Nxd) -> None:
    nxd(8, tp=4, ep=2)
    layer, (weight, bias) = make(ExpertFusedColumnParallelLinear, stride=2), by_hand()
    assert torch.equal(whole(layer.weight, 2, 2), weight) and torch.equal(whole(layer.bias, 1, 2), bias)
    gate, up = per_rank(layer.weight)[0].chunk(2, 2)
    assert torch.equal(gate, weight[:4, :, :2]) and torch.equal(up, weight[:4, :, 8:10])


def test_an_init_method_gets_one_expert_at_a_time(nxd: Nxd) -> None:
    nxd(4, tp=2, ep=2)
    shapes = []

    def init(weight: torch.Tensor) -> torch.Tensor:
        shapes.append(list(weight.shape))
        return torch.nn.init.xavier_normal_(weight)

    layer = make(ExpertFusedColumnParallelLinear, init_method=init, keep_master_weight=True)
    assert shapes == [[IN, OUT]] * E
    weight, _ = by_hand(torch.nn.init.xavier_normal_)
    assert torch.equal(whole(layer.weight, 2), weight)
    assert not any(t.any() for t in per_rank(layer.bias))
    assert (
        layer.master_weight.shape == (E, IN, OUT) and layer.master_weight.device.type == "cpu" and torch.equal(layer.master_weight, weight)
    )
    assert layer.master_bias.shape == (E, OUT)


def test_seeds_that_differ_by_rank(nxd: Nxd) -> None:
    nxd(4, tp=2, ep=2)
    torch.manual_seed(30 + xm.get_ordinal())
    layer = ExpertFusedColumnParallelLinear(E, IN, OUT)
    for rank, shard in enumerate(per_rank(layer.weight)):
        torch.manual_seed(30 + rank)
        full = torch.stack([sharded_weights.default_init(torch.empty(IN, OUT)) for _ in range(E)])
        e, k = (parallel_groups.places(kind)[rank] for kind in ("ep", "tp"))
        assert torch.equal(shard, full[4 * e : 4 * e + 4, :, 8 * k : 8 * k + 8])


@pytest.mark.parametrize("kind", KINDS)
def test_meta_device(nxd: Nxd, kind: Any) -> None:
    nxd(8, tp=2, ep=4)
    with model_utils.init_on_device("meta"):
        model = torch.nn.Sequential(make(kind))
    (layer,) = model
    assert layer.weight.is_meta and list(layer.weight.shape) == [2, *([IN, 8] if KINDS[kind] == 2 else [4, OUT])]
    assert list(layer.bias.shape) == [2, 8 if KINDS[kind] == 2 else OUT]
    torch.manual_seed(7)
    model_utils.materialize_model(model, "xla", lambda module: module.init_weight_cpu() if module is layer else None)
    weight, bias = by_hand()
    assert torch.equal(whole(layer.weight, KINDS[kind]), weight)
    assert torch.equal(whole(layer.bias, 1 if KINDS[kind] == 2 else None), bias)
    assert layer.weight.expert_model_parallel and layer.weight.partition_dim == KINDS[kind]
    torch.manual_seed(8)
    layer.init_weight_cpu()
    assert not torch.equal(whole(layer.weight, KINDS[kind]), weight)


def test_one_distribution_of_experts(nxd: Nxd) -> None:
    nxd(8, tp=2, ep=4)
    distribution = [[7, 0], [1, 6], [5, 2], [3, 4]]
    layer, (weight, bias) = make(ExpertFusedRowParallelLinear, expert_distribution=distribution, reduce_output=False), by_hand()
    assert torch.equal(whole(layer.weight, 1, distribution=distribution), weight)
    assert torch.equal(per_rank(layer.bias)[2], bias[[1, 6]])
    assert layer.weight.expert_distribution == layer.expert_distribution == distribution
    x = torch.randn(E, 3, IN // 2)
    partial = layer(by_expert_rank(lambda e: x[distribution[e]]))
    for e, value in enumerate(of_expert_ranks_any(partial)):
        expected = torch.bmm(x[distribution[e]], weight[distribution[e], : IN // 2]) + bias[distribution[e]].unsqueeze(1) / 2
        torch.testing.assert_close(value, expected)


# -- what parameters say of themselves ----------------------------------------------------------------


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_attributes_and_state(nxd: Nxd, kind: Any, ep: int) -> None:
    nxd(4, tp=2, ep=ep)
    layer = make(kind, stride=2 if KINDS[kind] == 2 else 1)
    local = [IN, OUT // 2] if KINDS[kind] == 2 else [IN // 2, OUT]
    shapes = {name: list(t.shape) for name, t in layer.state_dict().items()}
    assert shapes == {"weight": [E // ep, *local], "bias": [E // ep, local[1]]}
    layer.to("xla").bfloat16()
    weight, bias = layer.weight, layer.bias
    assert weight.tensor_model_parallel and weight.partition_dim == KINDS[kind] and weight.num_partitions == 2
    assert weight.partition_stride == (2 if KINDS[kind] == 2 else 1)
    assert getattr(bias, "tensor_model_parallel", False) is (KINDS[kind] == 2)
    for p in (weight, bias):
        assert hasattr(p, "expert_model_parallel") is (ep > 1) and grads.is_expert(p) is (ep > 1)
        assert not hasattr(p, "is_prefill") or p.is_prefill
    lies = sharded.varying(weight)
    axes = {0: "ep", KINDS[kind]: "tp"} if ep > 1 else {KINDS[kind]: "tp"}
    assert dict(enumerate(lies.spec)) == {d: axes.get(d) for d in range(len(lies.spec))}
    assert list(lies.global_shape) == [E, IN, OUT]
    assert isinstance(layer, ExpertFusedLinear) and isinstance(layer, ColumnParallelLinear if KINDS[kind] == 2 else RowParallelLinear)
    assert f"num_experts={E}, input_size={IN}, output_size={OUT}, bias=True, tp=2, ep={ep}" in repr(layer)


def test_groups_of_your_own(nxd: Nxd) -> None:
    """Experts over the tensor parallel ranks, undivided themselves."""
    nxd(4, tp=2, ep=2)
    alone = layer_groups.Members([[r] for r in range(4)])
    layer = make(
        ExpertFusedColumnParallelLinear, tensor_model_parallel_group=alone, expert_model_parallel_group=parallel_groups.group("tp")
    )
    weight, _ = by_hand()
    for rank, shard in enumerate(per_rank(layer.weight)):
        k = parallel_groups.places("tp")[rank]
        assert torch.equal(shard, weight[4 * k : 4 * k + 4])


# -- running -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("grouped", [False, True])
def test_a_row_layer_that_reduces(nxd: Nxd, grouped: bool) -> None:
    """Also from an input that all ranks have whole. The bias counts once, and every copy of it gets the same gradient as alone."""
    nxd(4, tp=4)
    x, weights = torch.randn(E, 3, IN), torch.randn(E, 3, OUT)
    layer, (weight, bias) = make(ExpertFusedRowParallelLinear, input_is_parallel=False).to("xla"), by_hand()
    ends = torch.arange(3, 27, 3, dtype=torch.int32).to("xla")
    given = x.to("xla").requires_grad_()
    out = layer.rows(given.flatten(0, 1), ends).view(E, 3, OUT) if grouped else layer(given)
    (out * weights.to("xla")).sum().backward()

    plain = [t.clone().requires_grad_() for t in (x, weight, bias)]
    expected = torch.bmm(plain[0], plain[1]) + plain[2].unsqueeze(1)
    (expected * weights).sum().backward()
    torch.testing.assert_close(of_expert_ranks(out)[0], expected.detach())
    torch.testing.assert_close(of_expert_ranks(given.grad)[0], plain[0].grad)
    torch.testing.assert_close(whole(layer.weight.grad, 1), plain[1].grad)
    torch.testing.assert_close(whole(layer.bias.grad, None), plain[2].grad)


@pytest.mark.parametrize("k, n", [(16, 8), (6, 5), (12, 1)])
def test_any_number_of_columns(nxd: Nxd, k: int, n: int) -> None:
    """torch's own grouped product wants rows of multiples of 16 bytes."""
    nxd(1)
    given = [torch.randn(10, k), torch.randn(3, k, n), torch.randn(3, n)]
    ends = torch.tensor([4, 4, 9])
    plain, ours = ([t.clone().to(device).requires_grad_() for t in given] for device in ("cpu", "xla"))
    expected, out = grouped_product(*plain[:2], ends, plain[2]), grouped_product(*ours[:2], ends.to("xla"), ours[2])
    torch.testing.assert_close(out.cpu(), expected)
    torch.testing.assert_close(expected[4:9], plain[0][4:9] @ plain[1][2] + plain[2][2])
    (expected**2).sum().backward()
    (out**2).sum().backward()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-4, atol=1e-5)


def test_a_full_tensor_on_xla_is_cut_where_it_is(nxd: Nxd) -> None:
    nxd(8, tp=2, ep=2)
    full, held = torch.randn(4, 6, 8), ((3, 0), (1, 2))
    entries = sharded_weights.Entries(parallel_groups.group("ep"), held)
    partition = sharded_weights.Partition(parallel_groups.group("tp"), 2, 2, entries=entries)
    for given in (full, full.to("xla")):
        found = sharded_weights.local(given, partition, 4)
        assert sharded.varying(found).spec == PartitionSpec("ep", None, "tp")
        for rank, value in enumerate(per_rank(found)):
            assert torch.equal(value, partition.part(full, rank))
    assert partition.full_shape(partition.local_shape([4, 6, 8])) == [4, 6, 8]


# -- optimizers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp, ep", [(2, 2), (1, 4), (2, 4)])
def test_zero1_steps_as_one_device_does(nxd: Nxd, tp: int, ep: int) -> None:
    """Gradients of all copies of an expert are added up and divided by dp, the norm is that of all experts, and so is the step."""
    nxd(8, tp=tp, ep=ep)
    layer = make(ExpertFusedColumnParallelLinear, stride=2).to("xla")
    parameters = {"weight": (layer.weight, 2), "bias": (layer.bias, 1)}
    plain = {n: torch.nn.Parameter(whole(p.detach(), dim, 2)) for n, (p, dim) in parameters.items()}
    ours = NeuronEPZero1Optimizer(list(layer.parameters()), optim.AdamW, grad_clipping=True, max_norm=0.3, lr=1e-2)
    alone = optim.AdamW(plain.values(), lr=1e-2)
    places = {kind: parallel_groups.places(kind) for kind in ("ep", "edp")}
    copies, dp = parallel_groups.size("edp"), parallel_groups.size("dp")
    for _ in range(3):
        for n, (p, dim) in parameters.items():
            of = torch.randn(copies, *plain[n].shape)
            plain[n].grad = of.sum(0) / dp
            partition = layer._partitions[n]
            assert partition.dim == dim
            p.grad = own([partition.part(of[places["edp"][r]], r) for r in range(8)])
        norm = torch.nn.utils.clip_grad_norm_(plain.values(), 0.3)
        alone.step()
        ours.step()
        executor.sync()
        torch.testing.assert_close(per_rank(ours.grad_norm)[0].reshape(()), norm, rtol=1e-4, atol=1e-6)
    for n, (p, dim) in parameters.items():
        torch.testing.assert_close(whole(p.detach(), dim, 2), plain[n].detach(), rtol=1e-4, atol=1e-6)
        state = ours.base_optimizer.state[ours.shard_of[p]]
        assert state["exp_avg"].shape[0] == -(-p.shape[0] // copies)


@pytest.mark.parametrize("kind", KINDS)
def test_norm_of_gradients(nxd: Nxd, kind: Any) -> None:
    nxd(8, tp=2, ep=2)
    layer = make(kind)
    layer.to("xla")
    full = {"weight": torch.randn(E, IN, OUT), "bias": torch.randn(E, OUT)}
    for name, p in layer.named_parameters():
        p.grad = own([layer._partitions[name].part(full[name], r) for r in range(8)])
    expected = torch.cat([t.flatten() for t in full.values()]).norm()
    for norm in per_rank(grads.get_grad_norm(layer.parameters())):
        torch.testing.assert_close(norm.reshape(()), expected)


def test_equal_layers_in_a_row_train(nxd: Nxd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their weights become rows of one stacked array, which is cut along two dims."""
    monkeypatch.setenv("NXD_JAX_FOLD", "3")
    nxd(4, tp=2, ep=2)
    torch.manual_seed(0)
    layers = [
        (ExpertFusedColumnParallelLinear(4, IN, OUT), ExpertFusedRowParallelLinear(4, OUT, IN, reduce_output=False)) for _ in range(6)
    ]
    model = torch.nn.ModuleList(torch.nn.ModuleList(pair) for pair in layers).to("xla")
    plain = [[whole(w.weight, dim).clone().requires_grad_() for w, dim in zip(pair, (2, 1), strict=True)] for pair in layers]
    ours, alone = optim.SGD(model.parameters(), lr=0.1), optim.SGD([w for pair in plain for w in pair], lr=0.1)
    x = torch.randn(4, 3, IN)
    for _ in range(3):
        y = by_expert_rank(lambda e: x[held_by(e, 4)])
        for up, down in model:
            y = y + regions.reduce_from_tensor_model_parallel_region(down(torch.tanh(up(y))))
        (y**2).mean().backward()
        ours.step()
        ours.zero_grad()
        executor.sync()
        z = x
        for up, down in plain:
            z = z + torch.tanh(z @ up) @ down
        ((z**2).mean() * 2).backward()  # an expert parallel rank's mean is over half of it
        alone.step()
        alone.zero_grad()
    assert {type(up.weight._storage.held) for up, _ in layers} == {stacked_arrays.Row}
    for (up, down), (w_up, w_down) in zip(layers, plain, strict=True):
        torch.testing.assert_close(whole(up.weight.detach(), 2), w_up.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(whole(down.weight.detach(), 1), w_down.detach(), rtol=1e-4, atol=1e-5)


# -- processes ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_of_one_rank_give_what_one_process_gives(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'aliases'}"}
    starts = {
        "one": [sys.executable, "-m", "nxd_jax.run", "--nproc_per_node=2"],
        "two": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    }
    for name, launcher in starts.items():
        (tmp_path / name).mkdir()
        command = [*launcher, two_processes.__file__, str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        one, two = (torch.load(tmp_path / name / f"{rank}.pt") for name in starts)
        assert one.pop("spec") == two.pop("spec") == {"gate_up": "P('ep',)", "down": "P('ep',)"}
        for key in one:
            torch.testing.assert_close(one[key], two[key], rtol=1e-5, atol=1e-6, msg=lambda m, at=(key, rank): f"{at}: {m}")


# -- mistakes ----------------------------------------------------------------------------------------


def test_errors_of_the_product(nxd: Nxd) -> None:
    nxd(1)
    x, weight, product = torch.ones(3, 2, IN), torch.ones(3, IN, OUT), ExpertFusedLinearWithAsyncCommunication.apply
    with pytest.raises(NotImplementedError, match=r"takes no bias: add it to the result"):
        product(x, weight, torch.ones(3, OUT), False, False)
    with pytest.raises(NotImplementedError, match=r"no sequence parallelism: experts get whole tokens, gather them first"):
        product(x, weight, None, False, True)
    with pytest.raises(RuntimeError, match=r"the tokens of 2 experts, the weight is of 3: give \[3, \.\.\., hidden\], or \[1"):
        product(x[:2], weight, None, False, False)
    with pytest.raises(ValueError, match=r"takes rows \[m, k\], .* got rows \[3, 2, 8\], weight \[3, 8, 16\], ends \[3\]"):
        grouped_product(x, weight, torch.ones(3))
    with pytest.raises(ValueError, match=r"ends \[3\], bias \[3, 8\]"):
        grouped_product(x[0], weight, torch.ones(3), torch.ones(3, IN))


def test_errors_of_the_layers(nxd: Nxd) -> None:
    nxd(8, tp=2, ep=4)
    with pytest.raises(
        AssertionError, match=r"6 is not divisible by 4: ExpertFusedColumnParallelLinear's num_experts over 4 expert parallel"
    ):
        ExpertFusedColumnParallelLinear(6, IN, OUT)
    with pytest.raises(AssertionError, match=r"15 is not divisible by 2: .*output_size over 2 tensor parallel ranks"):
        ExpertFusedColumnParallelLinear(E, IN, 15)
    for distribution in ([[0, 1], [2, 3], [4, 5]], [[0, 1], [2, 3], [4, 5], [6, 6]], [[0, 1, 2], [3], [4, 5], [6, 7]]):
        with pytest.raises(
            ValueError, match=r"a list for each of the 4 expert parallel ranks, all of one length, .* the experts 0\.\.7 once"
        ):
            ExpertFusedRowParallelLinear(E, IN, OUT, expert_distribution=distribution)


@pytest.mark.parametrize("kind", KINDS)
def test_lora_leaves_experts_alone(nxd: Nxd, kind: Any) -> None:
    """They are column- and row-parallel layers, too, but one adapter for all experts is not what anybody asked for."""
    nxd(4, tp=2, ep=2)
    with pytest.raises(ValueError, match=rf"target_modules matches 0, a {kind.__name__}, which LoRA cannot adapt. It adapts Linear"):
        LoraModel(torch.nn.Sequential(make(kind)), LoraConfig(target_modules=["0"]))


def test_without_groups_it_says_so(nxd: Nxd) -> None:
    nxd(1)
    parallel_groups.destroy()
    world.configure(world.World(1))
    with pytest.warns(UserWarning, match="a parallel layer was made before parallel_state.initialize_model_parallel") as seen:
        ExpertFusedColumnParallelLinear(E, IN, OUT)
    assert seen[0].filename == __file__
