"""Gradient scalers where only one rank's gradients overflow, with optimizers whose step reduces gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import neuronx_distributed as nxd
import pytest
import torch
import torch.distributed as dist
import torch_xla
from torch import nn
from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

from tests.torch_bridge.ranks import eager
from torch_bridge.collectives import backend  # noqa: F401  (it registers backend "xla")
from torch_bridge.mesh import world
from torch_bridge.torch_xla.amp import GradScaler

OVERFLOWS = {1: 1, 3: 0}
"""The rank that overflows, by step."""


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    world.configure(world.World(2))
    dist.init_process_group("xla")
    yield
    nxd.parallel_layers.parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    world.configure(None)


def inputs(step: int, rank: int) -> torch.Tensor:
    values = torch.linspace(-1, 1 + rank + step, 12).reshape(4, 3)
    return values * torch.inf if OVERFLOWS.get(step) == rank else values


def alone() -> tuple[nn.Module, list[float]]:
    """torch's own scaler on the whole batch."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)  # type: ignore[attr-defined]
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        loss = torch.stack([model(inputs(step, rank)).pow(2).mean() for rank in range(2)]).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return model, scales


def bare(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model.to("xla")
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, grad_clipping=False, lr=0.1)


def nxds(zero1: bool) -> Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]:
    def make(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        config = nxd.neuronx_distributed_config(optimizer_config={"zero_one_enabled": zero1, "grad_clipping": False})
        ours = nxd.initialize_parallel_model(config, lambda: model)
        return ours, nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, ours.parameters(), lr=0.1)

    return make


@pytest.mark.parametrize("scaler_of", [lambda **k: torch.amp.GradScaler("xla", **k), GradScaler], ids=["torch", "torch_xla"])  # type: ignore[attr-defined]
@pytest.mark.parametrize("make", [bare, nxds(False), nxds(True)], ids=["zero1", "nxd", "nxd-zero1"])
def test_all_ranks_skip_together(make: Any, scaler_of: Any) -> None:
    """NxD's ZeRO-1 adds gradients up in `main_grad`, which is unscaled, too."""
    torch.manual_seed(0)
    model, optimizer = make(nn.Linear(3, 2))
    scaler = scaler_of(init_scale=8.0, growth_interval=1)
    reference, expected = alone()
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        values = eager.each(lambda r, step=step: inputs(step, r))
        scaler.scale(model(eager.on_xla(values)).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        torch_xla.sync()
        scales.append(scaler.get_scale())
    assert scales == expected == [16.0, 8.0, 16.0, 8.0, 16.0]
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-4, atol=1e-5)  # counts on the device are float32
