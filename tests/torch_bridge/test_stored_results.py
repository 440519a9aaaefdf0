"""`compiler/stored_results.py`: on CPUs, angles are computed once a step, and gradients are transposed before products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
import torch_xla.core.xla_model as xm
from torch import nn

from tests.torch_bridge.devices import same
from torch_bridge.compiler import stored_results
from torch_bridge.lowerings import stored
from torch_bridge.runtime.session import STATE

HEADS, LENGTH, WIDTH = 4, 64, 32
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="other backends decide themselves what is computed again")


class Rotary(nn.Module):
    """Attention-like layers that turn their input by angles, as transformers' Llama does."""

    def __init__(self, layers: int, dtype: torch.dtype):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(layers))
        self.register_buffer("frequencies", 100 ** -(torch.arange(0, WIDTH, 2) / WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(LENGTH, device=x.device)[:, None] * self.frequencies
        angles = torch.cat((angles, angles), -1)
        cos, sin = ((f(angles) * 1.0).to(x.dtype)[None, None] for f in (torch.cos, torch.sin))
        for layer in self.layers:
            first, second = layer(x).chunk(2, -1)
            x = layer(x) * cos + torch.cat((-second, first), -1) * sin
        return x


def step(layers: int, dtype: torch.dtype) -> Callable[[str], Any]:
    def run(device: str) -> Any:
        model = Rotary(layers, dtype).to(device)
        x = torch.randn(2, HEADS, LENGTH, WIDTH, dtype=dtype).to(device).requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        xm.mark_step()
        return loss, x.grad, [p.grad for p in model.parameters()]

    return run


def optimized() -> str:
    """HLO of the program that ran last, as XLA compiled it."""
    return str(STATE.session.recent[-1].compiled.as_text())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_step_of_several_layers_computes_angles_once(dtype: torch.dtype) -> None:
    loose = dtype == torch.bfloat16
    same(step(3, dtype), rtol=3e-2 if loose else 2e-5, atol=1e-3 if loose else 1e-6)
    text = optimized()
    assert (text.count(" cosine("), text.count(" sine(")) == (1, 1)
    assert text.count("aten.cos") > 0, "ops in HLO keep their names"


def test_xla_would_compute_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, XLA has learnt what sines cost, and the pass can go."""
    monkeypatch.setattr(stored, "FEWEST", 1 << 40)
    step(4, torch.float32)("xla")
    assert optimized().count(" cosine(") > 1


def trained(dtype: torch.dtype = torch.float32, rows: int = 64, width: int = 48) -> Callable[[str], Any]:
    def run(device: str) -> Any:
        model = nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 40)).to(device, dtype)
        loss = model(torch.randn(rows, 32, dtype=dtype).to(device)).square().mean()
        loss.backward()
        xm.mark_step()
        return loss, [p.grad for p in model.parameters()]

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_transposed_before_products(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    loose = dtype == torch.bfloat16
    down = "lhs_contracting_dims={0}"
    same(trained(dtype), rtol=3e-2 if loose else 2e-5, atol=1e-3 if loose else 1e-6)
    assert sum(stored_results.STORED in node.meta for node in STATE.session.recent[-1].graph.nodes) == 2
    assert optimized().count(down) == 0
    monkeypatch.setattr(stored, "LARGEST", 0)
    same(trained(dtype, rows=65), rtol=3e-2 if loose else 2e-5, atol=1e-3 if loose else 1e-6)
    assert optimized().count(down) == 2


@pytest.mark.parametrize(("rows", "width"), [(8, 7), (1 << 17, 48), (12, 20)], ids=["narrow", "large", "few"])
def test_other_gradients_are_not(rows: int, width: int) -> None:
    trained(rows=rows, width=width)("xla")
    transposes = [node for node in STATE.session.recent[-1].graph.nodes if stored_results.STORED in node.meta]
    assert not any(node.meta["val"].shape[0] == width for node in transposes)


def marked(fn: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
    """How many ops of a function's program are marked."""
    fn(*(torch.rand(shape, dtype=dtype).to("xla") for shape in shapes))
    xm.mark_step()
    return sum(stored_results.STORED in node.meta for node in STATE.session.recent[-1].graph.nodes)


@pytest.mark.parametrize(
    ("count", "fn", "shapes"),
    [
        (1, lambda a, x: a.sin() * x, [(64, 32), (2, 64, 32)]),
        (1, lambda a, x: a.cos().to(torch.float64).neg().unsqueeze(0).expand(2, 64, 32) + x, [(64, 32), (2, 64, 32)]),
        (0, lambda a, x: a.sin() * x, [(64, 32), (64, 32)]),
        (0, lambda a, x: a.sin() ** 2 + a, [(64, 32)]),
        (0, lambda a, x: a.sin() @ x, [(64, 32), (32, 128)]),
        (0, lambda a, x: a.sin().sum(0) * x, [(64, 32), (2, 64, 32)]),
        (0, lambda a, x: a.sin() * x, [(8, 32), (2, 8, 32)]),
        (0, lambda a, x: a.tanh() * x, [(64, 32), (2, 64, 32)]),
    ],
    ids=["product", "views and casts", "of its size", "again", "matrix product", "sum", "few", "another function"],
)
def test_which_results_are_stored(count: int, fn: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    kept: list[Any] = []
    assert marked(lambda a, x=None: kept.append(fn(a, x)), *shapes) == count


def test_complex_angles_stay() -> None:
    assert marked(lambda a, x: [a.sin() * x], (64, 32), (2, 64, 32), dtype=torch.complex64) == 0
