"""A training loop that never ends its steps is told so, once; loops that do, in whatever way, are not."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn, optim

import torch_bridge
from torch_bridge.runtime import executor, step_hints

torch_bridge.register()

HINT = "the second step of this"


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    executor.sync()
    monkeypatch.setattr(step_hints, "_said", False)


@pytest.fixture
def hints(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "torch_bridge")
    return lambda: [r.getMessage() for r in caplog.records if HINT in r.getMessage()]


def backward(model: nn.Module) -> torch.Tensor:
    loss = model(torch.ones(2, 3, device="xla")).square().mean()
    loss.backward()
    return loss


class Own(optim.Optimizer):
    """An optimizer that nobody knows."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=0.1)


class WithMore(optim.AdamW):
    """One that goes on after the step that it inherits."""

    def step(self, closure=None):
        loss = super().step(closure)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.mul_(0.99)
        return loss


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD, optim.NAdam, Own, WithMore])
def test_loop_without_mark_step(kind: type, hints: Callable[[], list[str]]) -> None:
    """Fused, not fused, unknown, inherited: at the second step, with the line, once."""
    model = nn.Linear(3, 3).to("xla")
    optimizer = kind(model.parameters())
    said = []
    for _ in range(4):
        backward(model)
        optimizer.step()
        said.append(len(hints()))
    assert said == [0, 1, 1, 1]
    line = test_loop_without_mark_step.__code__.co_firstlineno + 8
    (text,) = hints()
    assert text.startswith(f"test_step_hints.py:{line}: {HINT} {kind.__name__}, ") and "torch_xla.sync() (xm.mark_step())" in text
    executor.sync()


def test_schedulers_and_closures(hints: Callable[[], list[str]]) -> None:
    model = nn.Linear(3, 3).to("xla")
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for k in range(2):
        optimizer.step(lambda: backward(model))
        schedule.step()
        assert len(hints()) == k
    executor.sync()


def marked(model: nn.Module) -> None:
    optimizer = optim.AdamW(model.parameters())
    for _ in range(3):
        backward(model)
        optimizer.step()
        executor.sync()


def read(model: nn.Module) -> None:
    optimizer = WithMore(model.parameters())
    for _ in range(3):
        loss = backward(model)
        optimizer.step()
        loss.item()


def accumulated(model: nn.Module) -> None:
    optimizer = optim.AdamW(model.parameters())
    for _ in range(3):
        for _ in range(4):
            backward(model)
        optimizer.step()
        executor.sync()


def two_optimizers(model: nn.Module) -> None:
    other = nn.Linear(3, 3).to("xla")
    a, b = optim.Adam(model.parameters()), optim.Adam(other.parameters())
    for _ in range(3):
        backward(model)
        a.step()
        backward(other)
        b.step()
        executor.sync()


def lbfgs(model: nn.Module) -> None:
    optimizer = optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        return backward(model)

    for _ in range(3):
        optimizer.step(closure)


def new_ones(model: nn.Module) -> None:
    for _ in range(3):
        backward(model)
        optim.SGD(model.parameters(), lr=0.1).step()


def without_gradients(model: nn.Module) -> None:
    optimizer = optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(2, 3, device="xla"))
        optimizer.step()


def failing(model: nn.Module) -> None:
    optimizer = optim.AdamW(model.parameters())
    backward(model)

    def closure():
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        optimizer.step(closure)
    optimizer.step()


def on_the_cpu(model: nn.Module) -> None:
    own = nn.Linear(3, 3)
    optimizer = optim.AdamW(own.parameters())
    for _ in range(3):
        model(torch.ones(2, 3, device="xla"))
        own(torch.ones(2, 3)).sum().backward()
        optimizer.step()


@pytest.mark.core(keep=4)
@pytest.mark.parametrize(
    "loop", [marked, read, accumulated, two_optimizers, lbfgs, new_ones, without_gradients, failing, on_the_cpu], ids=lambda f: f.__name__
)
def test_no_hint(loop: Callable[[nn.Module], None], hints: Callable[[], list[str]]) -> None:
    loop(nn.Linear(3, 3).to("xla"))
    executor.sync()
    assert hints() == []


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_hooks_are_no_hindrance_to_dynamo() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([p], lr=0.5)
    p.grad = torch.ones(2)
    torch.compile(optimizer.step, backend="eager")()
    assert p.tolist() == [0.5, 0.5]
