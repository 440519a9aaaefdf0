"""Tied and frozen parameters, dtypes, accumulation of gradients, clipping, groups: what the wrapper does beside sharing out."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm
from torch import nn
from torch_xla.amp import GradScaler
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP
from torch_xla.distributed.fsdp.wrap import always_wrap_policy
from torch_xla.distributed.fsdp.xla_flatten_params_wrapper import XlaFlattenParamsWrapper

from tests.torch_bridge.fsdp.models import Net, adam, alone, assert_close, batch, ids, nested, net, train, whole
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.recorder import sharded
from torch_bridge.runtime import executor


@pytest.mark.parametrize("flatten", [False, True])
def test_equals_plain_data_parallelism_bit_for_bit(flatten: bool, hosted: Hosted) -> None:
    """A step of SGD: sums over ranks have the same order, and nothing else differs."""
    hosted(4)
    states, losses = [], []
    for model in (net().to("xla"), FSDP(net(), flatten_parameters=flatten)):
        losses.append(train(model, torch.optim.SGD(model.parameters(), lr=0.5), range(1)))
        states.append(whole(model) if isinstance(model, FSDP) else {k: v.cpu() for k, v in model.state_dict().items()})
    assert losses[0] == losses[1]
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())


def test_adafactor_sees_whole_parameters_that_are_cut_by_rows(hosted: Hosted) -> None:
    def adafactor(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(model.parameters(), lr=0.05)

    expected = alone(net(), 4, optimize=adafactor)
    hosted(4)
    model = nested(net(), shard_param_on_dim_0=True)
    assert_close((train(model, adafactor(model)), whole(model)), expected, 1e-3)


@pytest.mark.parametrize("scaler_of", [torch.amp.GradScaler, GradScaler], ids=["torch", "torch_xla"])  # type: ignore[attr-defined]
def test_an_inf_in_one_part_skips_the_step_of_all(scaler_of: type[torch.amp.GradScaler], hosted: Hosted) -> None:  # type: ignore[name-defined]
    hosted(2)
    model = FSDP(nn.Linear(2, 2, bias=False).to("xla"), flatten_parameters=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = scaler_of(init_scale=8.0, growth_interval=1)
    found = []
    for factor in (1.0, math.inf, 1.0):
        before = whole(model)
        scaler.scale((model(torch.ones(1, 2, device="xla")) * torch.tensor([1.0, factor]).to("xla")).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        executor.sync()
        assert scaler._scale is not None
        scales = {s.item() for s in sharded.shards(scaler._scale)}
        found.append((scales, all(torch.equal(before[k], v) for k, v in whole(model).items())))
    assert found == [({16.0}, False), ({8.0}, True), ({16.0}, False)]
    assert all(v.isfinite().all() for v in whole(model).values())


@pytest.mark.parametrize("flatten", [False, True])
def test_tied_parameters(flatten: bool, hosted: Hosted) -> None:
    expected = alone(net(tied=True), 4)
    hosted(4)
    model = nested(net(tied=True), flatten_parameters=flatten, disable_reshard_on_root=False)
    assert_close((train(model, adam(model)), found := whole(model)), expected)
    assert torch.equal(found["head.weight"], found["embed.weight"])


class Adapted(nn.Module):
    """A linear layer that is frozen, and an adapter beside it that is trained (LoRA)."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a, self.b = nn.Linear(layer.in_features, 2, bias=False), nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.b(self.a(x))


def adapted() -> Net:
    model = net().requires_grad_(False)
    torch.manual_seed(1)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


@pytest.mark.parametrize("flatten", [False, True])
def test_frozen_parameters(flatten: bool, hosted: Hosted) -> None:
    expected = alone(adapted(), 4)
    hosted(4)
    model = nested(adapted(), flatten_parameters=flatten, disable_reshard_on_root=False)
    assert_close((train(model, adam(model)), whole(model)), expected)
    assert all((p.grad is None) != p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("wide", [False, True])
def test_computes_in_bfloat16(wide: bool, hosted: Hosted) -> None:
    """Shards, gradients and the optimizer's state are float32; what the module sees is bfloat16."""
    seen: list[torch.dtype] = []

    class Seen(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(self.head.weight.dtype)
            return super().forward(x)

    torch.manual_seed(0)
    expected = alone(net(), 4)
    hosted(4)
    torch.manual_seed(0)
    model = nested(Seen(), compute_dtype=torch.bfloat16, fp32_reduce_scatter=wide)
    assert_close((train(model, adam(model)), whole(model)), expected, 0.06)
    assert set(seen) == {torch.bfloat16}
    assert all(p.dtype == torch.float32 and p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_buffers_and_inputs_have_the_dtypes_asked_for(hosted: Hosted) -> None:
    hosted(2)
    inner = FSDP(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), buffer_dtype=torch.float16)
    model = FSDP(nn.Sequential(inner, nn.BatchNorm1d(4)), compute_dtype=torch.bfloat16)
    assert model[1].running_mean.dtype == torch.bfloat16 and model[1].num_batches_tracked.dtype == torch.int64
    assert inner[1].running_mean.dtype == torch.float16 and model[1].running_mean.device.type == "xla"
    assert model.get_shard_metadata()["buffer_info"]["_fsdp_wrapped_module.1.running_mean"] == {"_orig_dtype": torch.float32}
    assert whole(model)["0.1.running_mean"].dtype == torch.float32
    unwrapped = FSDP(nn.Linear(3, 2), compute_dtype=torch.bfloat16)
    assert unwrapped(torch.ones(1, 3, device="xla")).dtype == torch.bfloat16


@pytest.mark.parametrize("sync", [True, False])
def test_gradients_of_several_batches(sync: bool, hosted: Hosted) -> None:
    """Added up as shards, or whole under `no_sync`: equal to one device."""
    expected = net()
    sum(expected(ids(k, rank)) for k in range(3) for rank in range(4)).backward()
    hosted(4)
    model: Any = nested(net(), disable_reshard_on_root=False)
    for k in range(3):
        if sync or k == 2:
            model(batch(k)).backward()
        else:
            with model.no_sync():
                model(batch(k)).backward()
            executor.sync()
            assert all(p.grad is None for p in model.parameters())
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    state, start = whole(model), net().state_dict()
    for name, p in expected.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(start[name] - state[name], p.grad / 4, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_type", [2.0, 1, math.inf])
def test_clips_to_the_norm_of_whole_gradients(norm_type: float, hosted: Hosted) -> None:
    """A parameter that all ranks have whole, as one that was added after wrapping, counts once."""
    expected = nn.ModuleList([net(), nn.Linear(1, 3)])
    (sum(expected[0](ids(0, rank)) for rank in range(4)) / 4).backward()
    expected[1](torch.ones(2, 1)).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.3, norm_type)
    hosted(4)
    model: Any = nested(net())
    model.added = copy.deepcopy(expected[1]).to("xla")
    model(batch(0)).backward()
    model.added.zero_grad()
    model.added(torch.ones(2, 1, device="xla")).square().sum().backward()
    found = model.clip_grad_norm_(0.3, norm_type)
    assert found.item() == pytest.approx(norm.item(), rel=1e-5) and found.shape == ()
    assert model.clip_grad_norm_(1e9, norm_type).item() == pytest.approx(0.3, rel=1e-4)
    torch.testing.assert_close(model.added.weight.grad.cpu(), expected[1].weight.grad)
    assert [p for p in model.params_with_grad if p is model.added.weight]
    model.zero_grad()
    assert model.clip_grad_norm_(1.0).item() == 0.0


def test_groups_share_out_for_themselves(hosted: Hosted) -> None:
    """Two groups of two: each is what a world of two is."""
    worlds = [alone(net(), 2)]
    hosted(4)
    rank = xm.get_ordinal()
    options = dict(sharding_groups=[[0, 2], [1, 3]], sharding_rank=rank // 2, sharding_world_size=2)
    model = nested(net(), **options)
    assert_close((np_losses := train_pairs(model), whole_of_group(model)), worlds[0])
    assert len(np_losses) == 3
    metadata: Any = model.get_shard_metadata()  # type: ignore[operator]
    assert metadata["world_size"] == 2 and metadata["rank"] == 0


def train_pairs(model: nn.Module) -> list[list[float]]:
    """Ranks 0 and 2 get the batches of ranks 0 and 1 of a world of two, as do ranks 1 and 3."""
    optimizer, found = adam(model), []
    for k in range(3):
        optimizer.zero_grad()
        loss = model(sharded.from_ranks(lambda rank, k=k: ids(k, rank // 2), ("dp",)))
        loss.backward()
        optimizer.step()
        executor.sync()
        found.append([sharded.shards(loss.detach())[rank].item() for rank in (0, 2)])
    return found


def whole_of_group(model: Any) -> dict[str, torch.Tensor]:
    from torch_xla.distributed.fsdp import consolidate_sharded_state_dicts

    from torch_bridge.collectives import object_collectives

    states = object_collectives.each_ranks(dict(model.state_dict()))
    return consolidate_sharded_state_dicts([states[0], states[2]], model.get_shard_metadata())


@pytest.mark.parametrize("root", [True, False])
def test_a_step_that_ends_between_forward_and_backward(root: bool, hosted: Hosted) -> None:
    """As where a script prints the loss: what was gathered is gathered again, in another program."""
    expected = alone(net(), 2, range(2))
    hosted(2)
    model = nested(net(), disable_reshard_on_root=root)
    optimizer, losses = adam(model), []
    for k in range(2):
        optimizer.zero_grad()
        loss = model(batch(k))
        losses.append([t.item() for t in sharded.shards(loss.detach())])
        loss.backward()
        optimizer.step()
    assert_close((losses, whole(model)), expected)


def test_gradient_divide_factors(hosted: Hosted) -> None:
    hosted(2)
    x = torch.ones(1, 3, device="xla")
    grads = []
    for factors in (None, (2.0, 1.0), (1.0, 4.0)):
        torch.manual_seed(0)
        model = FSDP(nn.Sequential(FSDP(nn.Linear(3, 2))))
        if factors:
            model.set_gradient_divide_factors(*factors, recursive=True)
        model(x).sum().backward()
        grads.append(next(model.parameters()).grad[:3].tolist())  # type: ignore[index]
    assert grads == [[1.0] * 3, [1.0] * 3, [0.5] * 3]


def test_ends_the_step_after_each_backward_pass(hosted: Hosted) -> None:
    hosted(2)
    model = FSDP(nn.Sequential(FSDP(nn.Linear(3, 2), mark_step_on_finalization=True)), mark_step_on_finalization=True)
    model(torch.ones(1, 3, device="xla")).sum().backward()
    assert not any(p.grad._storage.pending for p in model.parameters())  # type: ignore[union-attr]
    assert not hasattr(model.forward, "played")


def test_a_module_that_is_called_twice_and_in_evaluation(hosted: Hosted) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
    x = torch.randn(3, 2, 4)

    def twice(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(model(x)[0])[0]

    expected = twice(plain, x)
    expected.sum().backward()
    hosted(2)
    model: Any = FSDP(copy.deepcopy(plain), disable_reshard_on_root=False)
    with torch.no_grad():
        torch.testing.assert_close(twice(model.eval(), x.to("xla")).cpu(), expected.detach())
    found = twice(model.train(), x.to("xla"))
    loss = found.sum()
    loss.backward(retain_graph=True)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    state = whole(model)
    for name, p in plain.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(state[name], (p - p.grad).detach(), rtol=1e-4, atol=1e-4)
    assert plain[1].weight_ih_l0.shape == model[1].weight_ih_l0.shape and model[1].weight_ih_l0.is_meta


@pytest.mark.parametrize("how", ["reset_parameters", "param_init_fn"])
def test_parameters_on_the_meta_device(how: str, hosted: Hosted) -> None:
    hosted(2)

    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu")
        for p in module.parameters():
            nn.init.ones_(p)

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    torch.manual_seed(0)
    found = whole(FSDP(model, auto_wrap_policy=always_wrap_policy, param_init_fn=init if how == "param_init_fn" else None))
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    if how == "param_init_fn":
        init(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items())


def test_names_and_representation(hosted: Hosted) -> None:
    hosted(2)
    model = FSDP(nn.Sequential(FSDP(nn.Linear(3, 4)), nn.Linear(4, 2)), flatten_parameters=True)
    names = [name for name, _ in model.get_original_names_and_sharded_parameters()]
    assert names == ["flat_param_0", "0.weight", "0.bias"]
    assert "world_size=2, rank=0, compute_dtype=torch.float32" in repr(model)
    assert model.module[1].weight.shape == (2, 4) and model[1].weight.is_meta and model[1].out_features == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_module_inside(ranks: int, hosted: Hosted) -> None:
    """torch_xla has a wrapper between: `model.module` is that one, `model.module.module` the module."""
    hosted(ranks)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Dropout())
    model = FSDP(plain)
    inner: Any = model.module
    assert (
        isinstance(inner, XlaFlattenParamsWrapper)
        and isinstance(inner, nn.Module)
        and inner.module is plain
        and not hasattr(plain, "module")
    )
    assert inner[1] is plain[1] and len(inner) == 2 and list(inner) == list(plain) and bool(inner)
    assert inner.eval() is inner and not plain.training and not inner.training and not plain[1].training
    inner.note, inner.extra = "kept", nn.Linear(1, 1)
    assert plain.note == "kept" and [name for name, _ in inner.named_children()] == ["0", "1", "extra"]
    assert [m for _, m in inner.named_modules()] == list(plain.modules()) and next(iter(inner.modules())) is plain
    assert list(inner.state_dict()) == list(plain.state_dict()) and inner.load_state_dict(plain.state_dict()).missing_keys == []
    del inner.note
    assert not hasattr(plain, "note") and copy.deepcopy(inner).module is not plain
    seen: list[Any] = []
    plain.register_forward_hook(lambda *args: seen.append(1))
    inner.apply(seen.append)
    assert seen == [*plain.children(), plain]
    if ranks == 1:
        x = torch.ones(2, 3, device="xla")
        del plain.extra
        assert torch.equal(inner(x).cpu(), plain(x).cpu()) and seen[-2:] == [1, 1] and inner.forward(x).shape == (2, 4)
        assert inner.double()[0].weight.dtype == plain[0].weight.dtype == torch.float64
