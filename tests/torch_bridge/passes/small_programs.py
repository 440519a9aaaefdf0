"""Small programs that go through one pass or another, each with what the pass is about."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm
from torch import nn

import torch_bridge
from torch_bridge.mesh import world
from torch_bridge.passes import check_replicas
from torch_bridge.passes.cut_segment import Place
from torch_bridge.recorder import sharded
from torch_bridge.runtime import executor, session

torch_bridge.register()


def arithmetic() -> Any:
    """Two leaves of one shape that do not commute, a view, a number, a value that nobody keeps, a write through a view."""
    x, y = torch.arange(6.0).reshape(2, 3).to("xla"), torch.ones(2, 3).to("xla")
    z = (x - y) * 3.5 + (x + y).t().reshape(2, 3) * 1.5
    (x * y).sum()
    z[0] = y[1]
    return z.cpu()


def captured() -> Any:
    """A module as a graph, with a parameter that it does not read."""
    module = nn.Bilinear(3, 3, 2)
    module.unread = nn.Parameter(torch.ones(1))
    return torch_bridge.capture(module, torch.ones(2, 3), torch.ones(2, 3))


def numbers() -> Any:
    """Different numbers of one type in different ops."""
    x = torch.ones(4).to("xla")
    return (torch.nn.functional.leaky_relu(x + 0.3, 0.25) * 0.3 - 0.7).cpu()


def training(foreach: bool | None = None) -> Any:
    """A step that creates its optimizer's state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Dropout(0.5)).to("xla")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=foreach)
    x = torch.ones(2, 3).to("xla")
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    return loss.detach().cpu(), [p.detach().cpu() for p in model.parameters()]


def training_in_place() -> Any:
    """The same recorded op by op: it takes the weights over, as the steps of large models do."""
    return training(foreach=False)


def halved() -> Any:
    """Two programs: the second reads the input and a value of the first."""
    x = torch.arange(4.0).to("xla")
    y = x * 3
    z = y.exp() + x
    own = session.current()
    own.placement = lambda segment: [Place("first" if k < len(segment.nodes) - 2 else "second") for k in range(len(segment.nodes))]
    try:
        return z.cpu()
    finally:
        own.placement = None


def prepared() -> Any:
    """State that is made full of a number before a tensor of another shape is read for the first time."""
    x = torch.arange(3.0).to("xla")
    state = torch.zeros(2, 3, device="xla")
    state.add_(1)
    state.mul_(x)
    return state.cpu(), x.cpu()


def unequal() -> Any:
    """Layers that differ in a constant only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NXD_JAX_FOLD", "4")
        x = torch.ones(3, 4).to("xla")
        for k in range(6):
            x = torch.roll(x.sin().exp().tanh().cos() * x, k, 0).sigmoid().square().neg().exp().sin().tanh()
        return x.cpu()


class Layers(nn.Module):
    """Equal layers in a row; something that one of them computes is kept."""

    def __init__(self, count: int = 5):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            y = layer(x)
            if k == 2:
                self.kept = y.detach()
            x = x + y
        return x


def layered() -> Any:
    """Layers that are folded, forward, backward and in the optimizer's step; their weights come and go as stacks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NXD_JAX_FOLD", "4")
        torch.manual_seed(0)
        model = Layers().to("xla")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4).to("xla")).square().sum().backward()
            optimizer.step()
            executor.sync()
        assert any(p.spec.plan is not None for p in session.current().recent)
        return model.kept.cpu(), [p.detach().cpu() for p in model.parameters()]


@contextlib.contextmanager
def _world(size: int, **axes: int) -> Iterator[None]:
    world.configure(world.World(size))
    world.set_axes(axes)
    try:
        yield
    finally:
        session.current().begin()
        world.configure(None)


def ranked() -> Any:
    """Values that differ along one of two axes, reduced and not, and random numbers."""
    with _world(4, dp=2, tp=2):
        x = sharded.from_ranks(lambda r: torch.arange(3.0) + r % 2, ("tp",))
        total = xm.all_reduce("sum", x * 2, groups=[[0, 1], [2, 3]])
        noise = torch.nn.functional.dropout(x + total, 0.5)
        parts = torch._foreach_mul([x, total], 2.0)
        executor.sync()
        return [[rank_values(y)] for y in (x, total, noise, *parts)]


def rank_values(t: torch.Tensor) -> Any:
    return t.sum().cpu()


def ranked_training(reduce: bool = True) -> Any:
    """A parameter that all ranks share, with a gradient from each rank's own batch."""
    with _world(2, dp=2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_replicas._reported.clear()
        layer = nn.Linear(3, 3).to("xla")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer(sharded.from_ranks(lambda r: torch.ones(2, 3) * (r + 1), ("dp",))).square().sum().backward()
        if reduce:
            xm.reduce_gradients(optimizer)
        optimizer.step()
        executor.sync()


def drifting() -> Any:
    """The same without the reduction."""
    return ranked_training(reduce=False)


def rounded() -> Any:
    """Stochastic rounding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1")
        x = torch.ones(2, 4, dtype=torch.bfloat16).to("xla")
        return (x * 1.1 + x).cpu()


def played() -> Any:
    """A module whose forward and backward are played."""
    torch.manual_seed(0)
    module = torch_bridge.optimize(nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 4)).to("xla"))
    for _ in range(6):
        module(torch.ones(2, 4).to("xla") * 1.5).square().sum().backward()
        module.zero_grad()
        executor.sync()
    forward: Any = module.forward
    assert forward.played
    return [p.detach().cpu() for p in module.parameters()]
