"""`torch_xla.experimental.eager_mode`: every op at once, but for what is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_xla
from torch import nn
from torch_xla.experimental import eager_mode, eager_mode_context, is_eager_mode

import torch_bridge
from tests.torch_bridge.devices import python
from tests.torch_bridge.replaying import batch, bits
from torch_bridge import metrics
from torch_bridge.recorder import dispatch
from torch_bridge.recorder import eager_mode as eager
from torch_bridge.replay.player import Player


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    eager.enable(False)


def _pending(*tensors: Any) -> bool:
    return any(t._storage.pending for t in tensors) or bool(dispatch.STATE.session.current.nodes)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).to("xla")


def _trained(module: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    losses = []
    for k in range(steps):
        optimizer.zero_grad()
        loss = module(batch(k)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_ops_run_at_once() -> None:
    torch_xla.sync()
    eager_mode(True)
    x = torch.ones(3, device="xla") * 2
    assert is_eager_mode() and not _pending(x)
    y = torch.zeros(2, 3, device="xla")
    y[1].add_(x)
    assert not _pending(y) and y.tolist() == [[0, 0, 0], [2, 2, 2]]
    eager_mode(False)
    assert not is_eager_mode() and _pending(x + 1)


def test_training_gives_the_same() -> None:
    expected = _trained(net())
    before = metrics.EXECUTE_TIME.count
    with eager_mode_context(True):
        assert is_eager_mode()
        found = _trained(net())
    assert not is_eager_mode() and found == pytest.approx(expected, rel=1e-5)
    assert metrics.EXECUTE_TIME.count - before > 30


def test_the_mode_around_comes_back_after_errors() -> None:
    with pytest.raises(ZeroDivisionError), eager_mode_context(True), eager_mode_context(False):
        assert not is_eager_mode()
        raise ZeroDivisionError
    assert not is_eager_mode()


@pytest.mark.parametrize("compile", [torch_xla.compile, torch_xla.experimental.compile])
def test_compiled_functions_are_one_graph(compile: Any) -> None:
    eager_mode(True)
    seen = []

    def step(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).exp()
        seen.append(_pending(y))
        return y.sum()

    x = torch.ones(3, device="xla")
    before = metrics.EXECUTE_TIME.count
    out = compile(step)(x)
    assert seen == [True] and is_eager_mode() and not _pending(out) and metrics.EXECUTE_TIME.count == before + 1
    with pytest.raises(ZeroDivisionError):
        compile(lambda: 1 / 0)()
    assert is_eager_mode() and not _pending(x + 1)


def test_compiled_modules_are_played() -> None:
    """As torch_xla's page on eager mode has it for inference; other optimized modules run op by op while it is on."""
    module = net().eval()
    expected = [bits(module(batch(k))) for k in range(6)]
    compiled: Any = torch.compile(module, backend="openxla")
    other = torch_bridge.optimize(net().eval())
    eager_mode(True)
    with torch.no_grad():
        for k in range(6):
            out = compiled(batch(k))
            assert not _pending(out) and bits(out) == expected[k]
            assert other(batch(k)).shape == (4, 6)
    assert isinstance(module.forward, Player) and module.forward.played
    assert isinstance(other.forward, Player) and not other.forward.played and not other.forward.off


def test_before_the_first_tensor() -> None:
    """It starts no JAX, and holds from the first tensor on."""
    python(
        "import sys, torch, torch_xla\n"
        "torch_xla.experimental.eager_mode(True)\n"
        "assert 'jax' not in sys.modules\n"
        "x = torch.ones(2, device='xla') + 1\n"
        "assert not x._storage.pending and x.tolist() == [2, 2]\n",
        timeout=200.0,
    )
