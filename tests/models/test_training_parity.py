"""Ten training steps on device xla give the losses and weights of eager torch on the CPU, in two compilations and one execution per step.

Tolerance, float32: each loss within 2e-5 (relative), each final weight within 2e-5 + 1e-4 * |weight|.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torch_bridge
from tests.models.zoo import TASKS, Loss, ResidualBlock, Task, classification_loss
from torch_bridge import metrics

STEPS = 10
LOSS = dict(rtol=2e-5, atol=0.0)
WEIGHT = dict(rtol=1e-4, atol=2e-5)

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}

torch_bridge.register()


@pytest.fixture(autouse=True)
def _counters() -> Iterator[None]:
    torch.xla.synchronize()
    metrics.clear_counters()
    yield


def train(
    build: Callable[[], nn.Module], loss_of: Loss, make_optimizer: MakeOptimizer, device: str
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of each step and the final state."""
    torch.manual_seed(0)
    model = build().to(device).train()
    optimizer = make_optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    batches = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batches, device)
        loss.backward()
        optimizer.step()
        schedule.step()
        if device == "xla":
            torch.xla.synchronize()
        losses.append(loss.detach())
    return [loss.item() for loss in losses], {name: value.cpu() for name, value in model.state_dict().items()}


def check(build: Callable[[], nn.Module], loss_of: Loss, make_optimizer: MakeOptimizer) -> None:
    losses, state = train(build, loss_of, make_optimizer, "cpu")
    executions = metrics.EXECUTE_TIME.count
    xla_losses, xla_state = train(build, loss_of, make_optimizer, "xla")
    assert metrics.EXECUTE_TIME.count - executions == STEPS
    assert [name for name in metrics.COUNTERS if name.startswith("aten::")] == []
    assert metrics.COUNTERS["UncachedCompile"] <= 2
    torch.testing.assert_close(xla_losses, losses, **LOSS)
    assert losses[-1] != losses[0]
    torch.testing.assert_close(xla_state, state, **WEIGHT)


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("llama", "sgd"), ("llama", "adamw"), *((m, ("adamw", "sgd")[i % 2]) for i, m in enumerate(m for m in TASKS if m != "llama"))],
)
def test_trains_as_on_the_cpu(model: str, optimizer: str) -> None:
    task: Task = TASKS[model]
    check(task.build, task.loss, OPTIMIZERS[optimizer])


def conv_net() -> nn.Module:
    return nn.Sequential(ResidualBlock(3, 4, 2), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(4, 5))


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
    torch.testing.assert_close(run("xla"), expected, **WEIGHT)
    assert metrics.COUNTERS["UncachedCompile"] <= 2
