"""Train a model on the CPU and on device xla, and compare.

Tolerance, float32: each loss within 2e-5 (relative), each final weight within 2e-5 + 1e-4 * |weight|.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torch_bridge
from tests.models.zoo import Loss
from torch_bridge import metrics

STEPS = 10
LOSS = dict(rtol=2e-5, atol=0.0)
WEIGHT = dict(rtol=1e-4, atol=2e-5)

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "plain": lambda p: torch.optim.SGD(p, lr=1e-2),
}

torch_bridge.register()


def train(
    build: Callable[[], nn.Module],
    loss_of: Loss,
    make_optimizer: MakeOptimizer,
    device: str,
    prepare: Callable[[nn.Module], Any] | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of each step and the final state. prepare: called with the model on its device."""
    torch.manual_seed(0)
    model = build().to(device).train()
    if prepare is not None:
        prepare(model)
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
    """Equal losses and weights, no CPU fallback, at most two compilations, one execution per step."""
    executions = train_and_compare(build, loss_of, make_optimizer)
    assert executions == STEPS
    assert metrics.COUNTERS.get("UncachedCompile", 0) <= 2


def played(build: Callable[[], nn.Module], loss_of: Loss, make_optimizer: MakeOptimizer) -> str:
    """Train with `torch_bridge.optimize` and without, with equal bits; how many calls were played, or why none was."""
    models: list[Any] = []
    plain = train(build, loss_of, make_optimizer, "xla")
    optimized = train(build, loss_of, make_optimizer, "xla", lambda model: models.append(torch_bridge.optimize(model)))
    torch.testing.assert_close(optimized, plain, rtol=0.0, atol=0.0, equal_nan=True)
    doing = models[0].forward
    return f"op by op: {doing.off}" if doing.off else f"{doing.played} of {STEPS} calls played"


def train_and_compare(build: Callable[[], nn.Module], loss_of: Loss, make_optimizer: MakeOptimizer) -> int:
    """Equal losses and weights and no CPU fallback; returns how many programs ran on device xla."""
    torch.xla.synchronize()
    losses, state = train(build, loss_of, make_optimizer, "cpu")
    metrics.clear_counters()
    executions = metrics.EXECUTE_TIME.count
    xla_losses, xla_state = train(build, loss_of, make_optimizer, "xla")
    executions = metrics.EXECUTE_TIME.count - executions
    assert [name for name in metrics.COUNTERS if name.startswith("aten::")] == []
    torch.testing.assert_close(xla_losses, losses, **LOSS)
    assert losses[-1] != losses[0]
    torch.testing.assert_close(xla_state, state, **WEIGHT)
    return executions
