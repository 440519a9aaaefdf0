"""Gradients that differ from those of a forward's operations, in models that are traced symbolically: autograd functions, `torch.no_grad`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from neuronx_distributed.pipeline import NxDPPModel, trace
from torch import nn

from tests.nxd_jax.conftest import Nxd


class Scaled(torch.autograd.Function):
    """`change(x)`, with a gradient of its own."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, factor: float, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.factor = factor
        return change(x), x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (g + h) * ctx.factor, None, None


def times(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


def autograd_function(model: Any, x: Any) -> Any:
    first, second = Scaled.apply(x, 3.0, functools.partial(times, by=2.0))
    return first + second * model.table


def no_grad(model: Any, x: Any) -> Any:
    with torch.no_grad():
        y = x * 2
    return x + y


class Net(nn.Module):
    def __init__(self, between: Callable[[Any, Any], Any]):
        super().__init__()
        self.between = between
        self.register_buffer("table", torch.arange(4.0))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.between(self, self.layers[0](x))).square().mean()


def gradients(model: nn.Module, *batches: torch.Tensor) -> list[Any]:
    for x in batches:
        (model(x) / len(batches)).backward()
    return [p.grad for p in model.parameters()]


def test_autograd_functions_are_nodes() -> None:
    model, x = Net(autograd_function), torch.randn(2, 4)
    original = vars(torch.autograd.Function)["apply"]
    traced = trace.trace_model(model, input_names=["x"])
    assert next(n.target.__name__ for n in traced.graph.nodes if n.op == "call_function") == "apply"
    assert vars(torch.autograd.Function)["apply"] is original
    expected = [g.clone() for g in gradients(model, x)]
    model.zero_grad()
    torch.testing.assert_close(gradients(traced, x), expected)


def test_a_closure_in_an_autograd_function_is_refused() -> None:
    """What it holds may be traced, too."""

    def forward(model: Any, x: Any) -> Any:
        return Scaled.apply(x, 3.0, lambda y: y * x)[0]

    with pytest.raises(RuntimeError, match=r"calls \S*apply with an object of type function"):
        trace.trace_model(Net(forward), input_names=["x"])


@pytest.mark.parametrize("off", [torch.no_grad, lambda: torch.autocast("xla", torch.bfloat16)], ids=["no_grad", "autocast"])
def test_other_modes_are_refused(off: Any) -> None:
    def forward(model: Any, x: Any) -> Any:
        with off():
            return x * 2

    with pytest.raises(
        RuntimeError, match="its forward switches gradients or autocast on or off, which a graph of operations does not show"
    ):
        trace.trace_model(Net(forward), input_names=["x"])


@pytest.mark.parametrize("between", [autograd_function, no_grad])
def test_pipelines_have_them(nxd: Nxd, between: Any) -> None:
    nxd(2, pp=2)
    torch.manual_seed(0)
    model, x = Net(between), torch.linspace(-1, 1, 16).reshape(4, 4)
    expected = [g.clone() for g in gradients(model, *x.chunk(2))]
    model.zero_grad()
    given: dict[str, Any] = {"num_microbatches": 2, "output_loss_value_spec": True, "input_names": ["x"], "pipeline_cuts": ["layers.0"]}
    pipeline = NxDPPModel(model, transformer_layer_cls=nn.Linear, **given)
    pipeline.run_train(x=x)
    torch.testing.assert_close([p.grad.cpu() for p in pipeline.local_parameters()], expected)
