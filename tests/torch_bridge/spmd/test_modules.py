"""FSDPv2, and `torch.distributed.tensor` on meshes of xla devices: parameters are divided, training is that of one device."""

from __future__ import annotations

import copy
import functools
import pathlib
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch_xla.distributed.fsdp import utils
from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch_xla.distributed.spmd import api, xla_sharding
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel as FSDPv2

from tests.torch_bridge.spmd.test_annotations import placed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, 3))


def losses(model: nn.Module, x: Any, steps: int = 3) -> list[float]:
    """Of a few steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for _ in range(steps):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss)
        if loss.device.type == "xla":
            torch_xla.sync()
    return [loss.item() for loss in found]


@pytest.mark.parametrize("nested", [False, True])
def test_fsdp_v2(mesh: xs.Mesh, nested: bool) -> None:
    """Every parameter that eight devices divide is an eighth on each, with its gradient and the optimizer's state."""
    fsdp = xs.Mesh(range(8), (8, 1), ("fsdp", "model"))
    xs.set_global_mesh(fsdp)
    reference = net()
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}) if nested else None
    model = FSDPv2(copy.deepcopy(reference), auto_wrap_policy=policy)
    assert isinstance(model[1], FSDPv2) is nested and model.module[0] is model[0]
    assert placed(model[1].up.weight) == (8, 16) and placed(model[1].norm.weight) == (2,) and placed(model[3].bias) == (3,)
    host = torch.randn(16, 8)
    x = host.to("xla")
    xs.mark_sharding(x, fsdp, ("fsdp", None))
    assert losses(model, x) == pytest.approx(losses(reference, host), rel=1e-4)
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        assert torch.allclose(p, q.cpu(), rtol=1e-3, atol=1e-5)
    assert placed(model[1].up.weight) == (8, 16) and placed(model[1].up.weight.grad) == (8, 16)


def test_what_stays_whole_is_said_once(mesh: xs.Mesh, caplog: pytest.LogCaptureFixture) -> None:
    fsdp = xs.Mesh(range(8), (8,), ("fsdp",))
    FSDPv2(nn.Sequential(nn.Linear(16, 3), nn.Linear(3, 5)), mesh=fsdp)
    FSDPv2(nn.Linear(3, 3), mesh=fsdp)
    (said,) = [m for m in caplog.messages if "fsdp" in m]
    assert "the 8 devices of 'fsdp' divide no dim of 0.bias, 1.weight, 1.bias: 92 bytes stay whole on every device" in said


def test_two_axes_of_data(mesh: xs.Mesh) -> None:
    both = xs.Mesh(range(8), (2, 4), ("dcn", "fsdp"))
    model = FSDPv2(net(), mesh=both, extra_data_axis="dcn")
    out = model(torch.randn(16, 8).to("xla"))
    assert placed(out) == (2, 3) and placed(model[1].up.weight) == (16, 16)


def test_outputs(mesh: xs.Mesh) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": self.inner(x)}

    fsdp = xs.Mesh(range(8), (8,), ("fsdp",))
    with pytest.raises(RuntimeError, match=r"the module gives a dict. Say how its tensors are divided: shard_output="):
        FSDPv2(Named(), mesh=fsdp)(torch.ones(8, 8).to("xla"))
    made = FSDPv2(Named(), mesh=fsdp, shard_output=lambda out, on: xs.mark_sharding(out["logits"], on, ("fsdp", None)))
    assert placed(made(torch.ones(8, 8).to("xla"))["logits"]) == (1, 8)
    inside = nn.Sequential(Named())
    inside.forward = lambda x: inside[0](x)  # type: ignore[method-assign]
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Named})
    seen: list[type] = []

    def shard_output(out: dict[str, torch.Tensor], on: xs.Mesh) -> None:
        """As transformers' own does, of the whole model and of what a policy wraps."""
        seen.append(type(out))
        xs.mark_sharding(out["logits"], on, ("fsdp", None))

    outer = FSDPv2(inside, mesh=fsdp, shard_output=shard_output, auto_wrap_policy=policy)
    assert placed(outer(torch.ones(8, 8).to("xla"))["logits"]) == (1, 8) and seen == [dict, dict]


def test_mistakes(mesh: xs.Mesh) -> None:
    with pytest.raises(ValueError, match=r"give a mesh with an axis 'fsdp' \(mesh=...\), or set one"):
        FSDPv2(net())
    with pytest.raises(ValueError, match=r"The provided fsdp axis is not in the mesh. It has \{'data': 4, 'model': 2\}"):
        FSDPv2(net(), mesh=mesh)
    with pytest.raises(TypeError, match="unknown options reshard_after_forward"):
        FSDPv2(net(), mesh=mesh, reshard_after_forward=True)
    fsdp = xs.Mesh(range(8), (8,), ("fsdp",))
    with pytest.raises(RuntimeError, match="the module is wrapped already"):
        FSDPv2(FSDPv2(net(), mesh=fsdp), mesh=fsdp)


def test_without_use_spmd() -> None:
    with pytest.raises(RuntimeError, match=r"Call torch_xla.runtime.use_spmd\(\)"):
        FSDPv2(net())


def test_distribute_tensor(mesh: xs.Mesh) -> None:
    on = DeviceMesh("xla", torch.arange(8).reshape(2, 4), mesh_dim_names=("a", "b"))
    host = torch.randn(8, 16)
    both = distribute_tensor(host, on, [Shard(0), Shard(1)])
    assert isinstance(both, xs.XLAShardedTensor) and placed(both.global_tensor) == (4, 4) and torch.equal(both.cpu(), host)
    twice = distribute_tensor(host, on, [Shard(0), Shard(0)])
    assert placed(twice.global_tensor) == (1, 16)
    assert distribute_tensor(host, on, [Replicate(), Replicate()]).sharding_spec == "{replicated}"
    assert torch.allclose((both @ host.T.to("xla")).cpu(), host @ host.T, atol=1e-5)
    with pytest.raises(ValueError, match=r"the tensor is divided already, as \{devices=\[2,4\]"):
        api.xla_distribute_tensor(both, on, [Shard(0), Shard(1)])
    with pytest.raises(ValueError, match="takes as many placements"):
        api.xla_distribute_tensor(host, on, [Shard(0)])
    with pytest.raises(ValueError, match="names dim 2 of a tensor with 2 dims"):
        api.xla_distribute_tensor(host, on, [Shard(2), Replicate()])


def test_distribute_module(mesh: xs.Mesh) -> None:
    on = DeviceMesh("xla", list(range(8)))
    reference = net()
    host = torch.randn(8, 8)

    def divide(name: str, module: nn.Module, over: DeviceMesh) -> None:
        if isinstance(module, nn.Linear) and module.out_features == 64:
            api.xla_distribute_tensor(module.weight, over, [Shard(0)])

    def inputs(module: nn.Module, given: Any, over: DeviceMesh) -> Any:
        return tuple(xs.wrap_as_sharded_tensor(api.xla_distribute_tensor(x, over, [Shard(0)])).global_tensor for x in given)

    model = distribute_module(copy.deepcopy(reference), on, divide, inputs, lambda outputs, over: outputs)
    assert placed(model[1].up.weight) == (8, 16)
    assert torch.allclose(model(host.to("xla")).cpu(), reference(host), atol=1e-5)
    with pytest.raises(ValueError, match=r"input_fn takes \(module, values, mesh\), this one takes 1 arguments"):
        distribute_module(net(), on, input_fn=lambda x: x)


def test_weights_go_to_files_and_back(mesh: xs.Mesh, tmp_path: pathlib.Path) -> None:
    """A file has whole tensors; loading leaves them divided as they are, with the optimizer's state."""
    fsdp = xs.Mesh(range(8), (8,), ("fsdp",))
    model = FSDPv2(net(), mesh=fsdp)
    x = torch.randn(16, 8).to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(x).square().mean().backward()
    optimizer.step()
    xm.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "all.pt")
    expected = losses(model, x, 1)
    state = torch.load(tmp_path / "all.pt")
    assert state["model"]["1.up.weight"].shape == (64, 16) and state["model"]["1.up.weight"].device.type == "cpu"
    net().load_state_dict(state["model"])
    other = FSDPv2(net(), mesh=fsdp)
    other.module.load_state_dict(state["model"])
    again = torch.optim.AdamW(other.parameters(), lr=0.01)
    again.load_state_dict(state["optimizer"])
    assert losses(other, x, 1) == pytest.approx(expected, rel=1e-6)
    assert again.load_state_dict(state["optimizer"]) is None and placed(again.state[other[1].up.weight]["exp_avg"]) == (64, 16)
    other(x).square().mean().backward()
    again.step()
    assert placed(again.state[other[1].up.weight]["exp_avg"]) == (8, 16)
    assert placed(other[1].up.weight) == (8, 16) and torch.equal(again.state_dict()["state"][0]["step"], torch.tensor(2.0))


@pytest.mark.parametrize(
    "patch", [xla_sharding.apply_xla_patch_to_nn_linear, utils.apply_xla_patch_to_nn_linear], ids=["replaced", "patched"]
)
@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
def test_linear_layers_with_a_backward_pass_of_their_own(mesh: xs.Mesh, patch: Any, half: bool) -> None:
    """Also in autocast, whose products are of 16 bits."""

    def gradients(model: nn.Module, x: Any, device: str) -> list[torch.Tensor]:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=half):
            model(x).float().square().mean().backward()
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    x = torch.randn(4, 2, 8)
    expected = gradients(net(), x, "cpu")
    model = net().to("xla")
    before = list(model.parameters())
    assert patch(model) is model
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    divided = xla_sharding.MarkShardingFunction.apply(x.to("xla"), mesh, ("data", None, None))
    torch.testing.assert_close(gradients(model, divided, "xla"), expected, rtol=2e-2 if half else 1e-4, atol=1e-3 if half else 1e-6)
    replaced = {type(m) for m in model.modules() if isinstance(m, nn.Linear)}
    assert replaced == ({xla_sharding.EinsumLinear} if patch is xla_sharding.apply_xla_patch_to_nn_linear else {nn.Linear})
