"""A loop whose tensors grow by one each time, and so compiles a program for every length, is told so, once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

import torch_bridge
from torch_bridge.compiler import growth_hints
from torch_bridge.runtime import executor

torch_bridge.register()


class Attention(nn.Module):
    """Keys that grow, as in a decoder's cache, or stay."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys = torch.cat([keys, self.k(x)], 1)
        scores = (self.q(x) @ keys.transpose(1, 2)).softmax(-1)
        return torch.tanh(scores @ keys).relu(), keys


@pytest.fixture
def hints(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    executor.sync()
    executor.clear_cache()
    monkeypatch.setattr(growth_hints, "_said", False)
    monkeypatch.setattr(growth_hints, "_seen", type(growth_hints._seen)())
    caplog.set_level(logging.WARNING, "torch_bridge")
    return lambda: [r.getMessage() for r in caplog.records if "times in a row" in r.getMessage()]


@torch.no_grad()
def run(lengths: Iterable[int], model: nn.Module) -> None:
    for n in lengths:
        x, _ = model(torch.ones(1, 1, 4).to("xla"), torch.ones(1, n, 4).to("xla"))
        x.sum().item()


def test_a_cache_that_grows(hints: Callable[[], list[str]]) -> None:
    """At the fourth length, with the script's line, once."""
    model = Attention().to("xla")
    run(range(3, 6), model)
    assert hints() == []
    run(range(6, 9), model)
    (text,) = hints()
    line = run.__wrapped__.__code__.co_firstlineno + 4  # type: ignore[attr-defined]
    assert (
        text.startswith(f"test_growth_hints.py:{line}: the same ")
        and "compiled 4 times in a row, each time for one element more (now [1, 6, 4])" in text
    )
    assert 'cache_implementation="static"' in text and "pad to one of a few lengths" in text


@pytest.mark.parametrize("lengths", [[3, 4, 5, 5, 5, 5], [3, 5, 7, 9, 11], [9, 8, 7, 6, 5], [3, 4, 5, 9, 10, 11], [4, 3, 4, 5]], ids=str)
def test_no_hint(lengths: list[int], hints: Callable[[], list[str]]) -> None:
    """Lengths that repeat, grow by more, shrink or jump."""
    run(lengths, Attention().to("xla"))
    assert hints() == []


def test_no_hint_outside_modules(hints: Callable[[], list[str]]) -> None:
    for n in range(3, 8):
        x = torch.ones(n).to("xla")
        for _ in range(12):
            x = (x + 1).tanh()
        x.sum().item()
    assert hints() == []


def test_what_counts_as_growing() -> None:
    grown = growth_hints._grown
    assert grown(((2, 3), (5,)), ((2, 4), (5,))) == (2, 4)
    assert grown(((2, 3), (3,)), ((2, 4), (4,))) == (2, 4)
    for after in (((2, 3), (5,)), ((3, 4), (5,)), ((2, 5), (5,)), ((2, 4), (4,)), ((2, 4),), ((2, 4, 1), (5,))):
        assert grown(((2, 3), (5,)), after) is None
