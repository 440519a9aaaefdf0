"""Calls of played modules that are calls of their program (`replay.direct`): what they give, what they leave behind, and where they are none."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_bridge
from tests.torch_bridge.replaying import player
from torch_bridge import metrics
from torch_bridge.replay.direct import Direct
from torch_bridge.runtime import executor, session
from torch_bridge.runtime.observers import Observer


class Sums(nn.Module):
    """Adds what it is given to a state, and counts its calls in a buffer."""

    calls: torch.Tensor

    def __init__(self, rule: Callable[..., Any] | None = None):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.rule = rule

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> Any:
        self.calls.add_(1)
        state.add_(self.layer(x) * 2.5)
        if self.rule is not None:
            return self.rule(self, x, state)
        both = torch.cat([state, x])
        return {"both": both, "parts": (both[:3], both[3:].T), "calls": self.calls + 0, "name": "sums"}


def pair(rule: Callable[..., Any] | None = None) -> tuple[Any, torch.Tensor, Any, torch.Tensor]:
    """A module with its state on the CPU, and the same on xla."""
    torch.manual_seed(0)
    plain = Sums(rule)
    return plain, torch.zeros(3, 4), torch_bridge.optimize(copy.deepcopy(plain).to("xla")), torch.zeros(3, 4, device="xla")


def new(seed: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def direct(module: Any, state: torch.Tensor, reference: Any = None, expected: Any = None) -> Direct | None:
    """What is there after enough calls for one to be played; the reference makes them too."""
    found = None
    for k in range(6):
        x = new(k).to("xla")
        _, found = player(module).at_once((x, state), [x])
        if reference is not None:
            reference(new(k), expected)
    return found


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys() and found["name"] == expected["name"]
    for a, b in (
        (found["both"], expected["both"]),
        (found["calls"], expected["calls"]),
        *zip(found["parts"], expected["parts"], strict=True),
    ):
        assert a.stride() == b.stride() and a.device.type == "xla"
        torch.testing.assert_close(a.cpu(), b)


@torch.no_grad()
def test_results_states_and_versions() -> None:
    """Those of the module in eager torch; nothing is recorded or compiled, and views share memory as they did."""
    plain, expected, module, state = pair()
    call = direct(module, state, plain, expected)
    assert call is not None
    before = metrics.COMPILE_TIME.count
    for k in range(10, 14):
        versions = state._version, module.calls._version
        played, calls = player(module).played, player(module).calls
        found = call.call([new(k)])
        assert not session.current().current.nodes
        assert (player(module).played, player(module).calls) == (played + 1, calls + 1)
        assert (state._version, module.calls._version) == (versions[0] + 1, versions[1] + 1)
        same(found, plain(new(k), expected))
        found["parts"][0].zero_()
        assert not found["both"][:3].any()
    torch.testing.assert_close(state.cpu(), expected)
    assert module.calls.item() == plain.calls.item() == 10
    assert metrics.COMPILE_TIME.count == before + 1, "for the zeros that the test writes"


@torch.no_grad()
def test_copies_of_a_state_keep_its_values() -> None:
    """The program takes the state's memory over: not where a copy that was not written yet has it too."""
    plain, expected, module, state = pair()
    call = direct(module, state, plain, expected)
    assert call is not None
    for k in range(3):
        executor.sync()
        kept, before = state.clone(), expected.clone()
        assert call.call([new(k)]) is not None
        plain(new(k), expected)
        torch.testing.assert_close(kept.cpu(), before)
        torch.testing.assert_close(state.cpu(), expected)


@torch.no_grad()
def test_what_is_not_as_it_was() -> None:
    """Then nothing is done, and the ordinary call does what eager torch does."""
    plain, expected, module, state = pair()
    call = direct(module, state, plain, expected)
    assert call is not None

    def refused(x: torch.Tensor | None = None) -> None:
        calls = player(module).calls
        values = state.cpu()
        assert call.call([new(0) if x is None else x]) is None
        assert player(module).calls == calls
        torch.testing.assert_close(state.cpu(), values, rtol=0, atol=0)

    refused(new(0).double())
    refused(new(0)[:2])
    refused(new(0).to("xla"))
    with torch.autocast("xla", dtype=torch.bfloat16):
        refused()
    with torch.enable_grad():
        refused()
    with torch.inference_mode():
        assert call.call([new(0)]) is None
    pending = state + 1
    assert call.call([new(0)]) is None
    pending.cpu()
    assert call.call([new(1)]) is not None
    plain(new(1), expected)
    for m in (module, plain):
        m.layer.weight.mul_(0.5)
    assert call.call([new(0)]) is None, "the new weight waits"
    executor.sync()
    refused()
    module.layer.weight.data = module.layer.weight.data + 0
    executor.sync()
    refused()
    again = direct(module, state, plain, expected)
    assert again is not None
    torch.testing.assert_close(state.cpu(), expected)
    same(again.call([new(8)]), plain(new(8), expected))


class Programs(Observer):
    """Content with being told of programs, as a pipeline's log of steps is."""

    programs_alone = True

    def __init__(self) -> None:
        self.seen = 0

    def phase(self, phase: Any, program: Any) -> Any:
        self.seen += phase == "dispatch"
        return contextlib.nullcontext()


@torch.no_grad()
def test_who_follows_what_runs() -> None:
    """An observer of the session, unless it is content with programs, or the environment's precision."""
    _, _, module, state = pair()
    call = direct(module, state)
    assert call is not None
    observer = Observer()
    session.current().observe(observer)
    try:
        assert call.call([new(0)]) is None
    finally:
        session.current().unobserve(observer)
    content = Programs()
    session.current().observe(content)
    try:
        assert call.call([new(0)]) is not None and content.seen == 1
    finally:
        session.current().unobserve(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1")
        assert call.call([new(0)]) is None
    with session.opened():
        assert call.call([new(0)]) is None
    assert call.call([new(0)]) is not None


@pytest.mark.parametrize(
    "rule",
    [
        lambda module, x, state: x,
        lambda module, x, state: {"a": [state + 1, state]},
        lambda module, x, state: torch.dropout(x, 0.5, True),
        lambda module, x, state: x + 1 if bool(module.calls > 0) else x - 1,
    ],
    ids=["an argument comes back", "a state comes back", "it draws", "it asks for a value"],
)
@torch.no_grad()
def test_calls_that_a_program_does_not_say_all_of(rule: Callable[..., Any]) -> None:
    _, _, module, state = pair(rule)
    assert direct(module, state) is None
    assert player(module).played or "asks" in player(module).state().reason


@torch.no_grad()
def test_arguments_that_none_can_take_the_place_of() -> None:
    """A view, what the module writes, and what it is given twice."""
    _, _, module, state = pair(lambda module, x, state: state + x)
    wide = torch.zeros(3, 8, device="xla")
    for _ in range(6):
        x = wide[:, :4]
        assert player(module).at_once((x, state), [x])[1] is None
        executor.sync()
        assert player(module).at_once((new(0).to("xla"), state), [state])[1] is None
    both = torch.zeros(3, 4, device="xla")
    for _ in range(6):
        assert player(module).at_once((both, both), [both])[1] is None


@torch.no_grad()
def test_what_waits_before_it_runs_with_it() -> None:
    plain, expected, module, state = pair()
    direct(module, state, plain, expected)
    x, more = new(7).to("xla"), state * 3
    found, call = player(module).at_once((x, state), [x])
    assert call is None
    torch.testing.assert_close(more.cpu(), expected * 3)
    same(found, plain(new(7), expected))


@torch.no_grad()
def test_a_program_that_fails_leaves_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, module, state = pair()
    call: Any = direct(module, state)
    values = state.cpu()

    def fail(args: Any) -> Any:
        raise RuntimeError("no device")

    version = state._version
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no device"):
        patch.setattr(call._program, "run", fail)
        call.call([new(0)])
    torch.testing.assert_close(state.cpu(), values, rtol=0, atol=0)
    assert state._version == version and call.call([new(0)]) is not None
