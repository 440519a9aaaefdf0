"""Modules under `torch_bridge.optimize` in torch's inference mode: played, with what eager torch gives, also as to which tensors are of that mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_bridge
from tests.torch_bridge.replaying import player

CALLS = 6


class Net(nn.Module):
    """A layer, a buffer that counts calls, and a rule for what is returned."""

    count: torch.Tensor

    def __init__(self, rule: Callable[..., Any]):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        self.rule = rule

    def forward(self, x: torch.Tensor) -> Any:
        self.count.add_(1)
        return self.rule(self, x, self.norm(self.layer(x)))


def pair(rule: Callable[..., Any]) -> tuple[Net, Net]:
    torch.manual_seed(0)
    plain = Net(rule)
    return plain, torch_bridge.optimize(copy.deepcopy(plain).to("xla"))  # type: ignore[return-value]


def batch(k: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(k))


def flat(out: Any) -> list[Any]:
    return list(out.values()) if isinstance(out, dict) else list(out) if isinstance(out, tuple) else [out]


RULES: dict[str, Callable[..., Any]] = {
    "a tensor": lambda m, x, y: y,
    "several": lambda m, x, y: {"y": y, "sum": y.sum(), "n": 3},
    "its argument": lambda m, x, y: (x, y),
    "what it holds": lambda m, x, y: (m.layer.weight, m.count, y),
    "its argument, written": lambda m, x, y: x.mul_(2) + y,
}


@pytest.mark.parametrize("inside", [True, False], ids=["input of the mode", "ordinary input"])
@pytest.mark.parametrize("name", RULES)
def test_results_are_those_of_eager_torch(name: str, inside: bool) -> None:
    """Values, modes of tensors, whether they are those that were given, and what stays in buffers, in training and evaluation."""
    plain, module = pair(RULES[name])
    for k in range(2 * CALLS):
        for m in (plain, module):
            m.train(k < CALLS)
        x = batch(k)
        own = x.to("xla")
        with torch.inference_mode():
            if inside:
                x, own = x.clone(), own.clone()
            expected, found = flat(plain(x)), flat(module(own))
        for a, b in zip(found, expected, strict=True):
            if isinstance(b, torch.Tensor):
                assert (a.is_inference(), a.requires_grad) == (b.is_inference(), b.requires_grad)
                assert (a is own) == (b is x) and (a is module.layer.weight) == (b is plain.layer.weight)
                torch.testing.assert_close(a.cpu(), b)
            else:
                assert a == b
        torch.testing.assert_close(own.cpu(), x)
    for a, b in zip(module.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a.cpu(), b)
    assert player(module).played >= 2 * (CALLS - 4), player(module).state()


@pytest.mark.parametrize("asks", [lambda x: torch.is_inference_mode_enabled(), lambda x: x.is_inference()], ids=["the mode", "a tensor"])
def test_a_forward_that_asks_for_the_mode(asks: Callable[[torch.Tensor], bool]) -> None:
    """It is played outside of the mode only."""
    plain, module = pair(lambda m, x, y: y + 1 if asks(x) else y - 1)
    for k in range(CALLS):
        with torch.inference_mode():
            x = batch(k)
            torch.testing.assert_close(module(x.to("xla")).cpu(), plain(x))
    assert not player(module).played
    plain, module = pair(lambda m, x, y: y + 1 if asks(x) else y - 1)
    for k in range(CALLS):
        with torch.no_grad():
            torch.testing.assert_close(module(batch(k).to("xla")).cpu(), plain(batch(k)))
    assert player(module).played


def test_weights_and_constants_of_the_mode() -> None:
    """Without versions nobody could tell that they were written: such modules are recorded op by op."""
    with torch.inference_mode():
        plain, module = pair(lambda m, x, y: y)
        constant = torch.ones(4).to("xla")
    assert module.layer.weight.is_inference()
    for k in range(CALLS):
        with torch.inference_mode():
            torch.testing.assert_close(module(batch(k).to("xla")).cpu(), plain(batch(k)))
    assert not player(module).played and "made in inference mode" in player(module).state().reason
    values: dict[str, torch.Tensor] = {"cpu": torch.ones(4), "xla": constant}
    plain, module = pair(lambda m, x, y: y + values[x.device.type])
    for k in range(CALLS):
        with torch.no_grad():
            torch.testing.assert_close(module(batch(k).to("xla")).cpu(), plain(batch(k)))
        for t in values.values():
            with torch.inference_mode():
                t.add_(1)
    assert not player(module).played


def test_gradients_after_it() -> None:
    """Calls with gradients are of another kind, and take turns with those without."""
    plain, module = pair(lambda m, x, y: y)
    for k in range(2 * CALLS):
        with torch.inference_mode():
            torch.testing.assert_close(module(batch(k).to("xla")).cpu(), plain(batch(k)))
        for m, x in ((plain, batch(k)), (module, batch(k).to("xla"))):
            m.zero_grad()
            m(x).square().sum().backward()
        found = [p.grad.cpu() for p in module.parameters() if p.grad is not None]
        torch.testing.assert_close(found, [p.grad for p in plain.parameters()], rtol=1e-3, atol=1e-4)
    assert player(module).played > CALLS
