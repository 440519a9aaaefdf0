"""TorchScript's modules on xla: scripted there, scripted or loaded on the CPU and moved, trained, saved. And `DataParallel`, and shared memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_bridge

torch_bridge.register()

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


def _trained(model: nn.Module, device: str) -> tuple[list[float], dict[str, Any]]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(3):
        x = torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(step)).to(device)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: t.detach().cpu() for name, t in model.state_dict().items()}


def test_a_module_on_xla_is_scripted_and_trains() -> None:
    script = torch.jit.script(_network().to("xla"))
    torch.testing.assert_close(_trained(script, "xla"), _trained(_network(), "cpu"), rtol=1e-4, atol=1e-5)
    optimized = torch_bridge.optimize(_network().to("xla"))
    x = torch.ones(2, 1, 4, 4, device="xla")
    expected = copy.deepcopy(optimized)(x)
    assert torch.equal(torch.jit.script(optimized)(x), expected)
    assert torch.equal(optimized.eval()(x).isfinite(), torch.ones_like(expected, dtype=torch.bool))


def test_a_scripted_module_moves_to_xla_and_back_and_trains() -> None:
    script = torch.jit.script(_network())
    script(torch.ones(2, 1, 4, 4)).sum().backward()
    gradient = dict(script.named_parameters())["0.weight"].grad.clone()
    script.to("xla")
    assert {t.device.type for t in script.state_dict().values()} == {"xla"}
    assert torch.equal(dict(script.named_parameters())["0.weight"].grad.cpu(), gradient)
    fresh = torch.jit.script(_network()).to("xla")
    torch.testing.assert_close(_trained(fresh, "xla"), _trained(_network(), "cpu"), rtol=1e-4, atol=1e-5)
    x = torch.ones(2, 1, 4, 4)
    on_xla = fresh.eval()(x.to("xla"))
    torch.testing.assert_close(fresh.to("cpu")(x), on_xla.cpu())
    assert fresh.to("xla", torch.bfloat16)(x.to("xla", torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("trace", [False, True])
def test_a_file_that_is_loaded_and_moved(trace: bool, tmp_path: Path) -> None:
    model, x = _network().eval(), torch.randn(2, 1, 4, 4)
    torch.jit.save(torch.jit.trace(model, x) if trace else torch.jit.script(model), tmp_path / "model.pt")
    loaded = torch.jit.load(tmp_path / "model.pt", map_location="cpu").to("xla")
    torch.testing.assert_close(loaded(x.to("xla")).cpu(), model(x))
    torch.jit.save(loaded.to("cpu"), tmp_path / "again.pt")
    torch.testing.assert_close(torch.jit.load(tmp_path / "again.pt")(x), model(x))


def test_data_parallel_calls_the_module_where_it_lies() -> None:
    x = torch.randn(2, 3)
    model = nn.DataParallel(nn.Linear(3, 2))
    assert model.module.weight.device.type == "cpu"
    expected = model(x).detach()
    model.to("xla")
    y = model(x.to("xla"))
    torch.testing.assert_close(y.detach().cpu(), expected)
    y.sum().backward()
    assert model.module.weight.grad.device.type == "xla"
    assert torch.equal(nn.DataParallel(model.module, device_ids=[0])(x.to("xla")).cpu(), y.cpu())


def test_sharing_memory_between_processes() -> None:
    assert not torch.ones(2, device="xla").is_shared()
    with pytest.raises(
        NotImplementedError, match=r"share_memory_ of a tensor on xla:0.*module\.cpu\(\)\.share_memory\(\).*torchrun or torch_xla\.launch"
    ):
        nn.Linear(2, 2).to("xla").share_memory()
