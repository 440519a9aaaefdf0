"""`foreach=True` and `fused=True` optimizers train as on the CPU, under schedules that change the learning rate and the momentum."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.models.training import STEPS, WEIGHT, MakeOptimizer, check
from tests.models.zoo import ResidualBlock, classification_loss
from torch_bridge import metrics


def conv_net() -> nn.Module:
    return nn.Sequential(ResidualBlock(3, 4, 2), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(4, 5))


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(
    "make_optimizer",
    [
        pytest.param(lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True), id="sgd-foreach"),
        pytest.param(lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True), id="sgd-fused"),
        pytest.param(lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True), id="adamw-foreach"),
        pytest.param(lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True), id="adamw-fused"),
        pytest.param(lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, fused=True), id="adam-amsgrad-fused"),
    ],
)
def test_foreach_and_fused_optimizers(make_optimizer: MakeOptimizer) -> None:
    check(conv_net, classification_loss, make_optimizer)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        pytest.param(lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True), id="adamw-foreach"),
        pytest.param(lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True), id="adamw-fused"),
        pytest.param(lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=True), id="sgd-foreach"),
        pytest.param(lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, fused=True), id="sgd-fused"),
    ],
)
def test_a_schedule_of_momentum_does_not_recompile(make_optimizer: MakeOptimizer) -> None:
    """OneCycleLR changes the learning rate and the momentum (or beta1) at every step."""

    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2).to(device)
        optimizer = make_optimizer(model.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1)
        x = torch.ones(4, 3).to(device)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            schedule.step()
            if device == "xla":
                torch.xla.synchronize()
        return [p.detach().cpu() for p in model.parameters()]

    expected = run("cpu")
    metrics.clear_counters()
    torch.testing.assert_close(run("xla"), expected, **WEIGHT)
    assert metrics.COUNTERS.get("UncachedCompile", 0) <= 2
