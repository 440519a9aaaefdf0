"""`NXD_JAX_REPLAY`: modules that are moved to xla are played, with auto after some calls, with all from the first."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import sys
import weakref
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as met
from torch import nn

import torch_bridge
from tests.torch_bridge.replaying import batch, compile_fast, player, run, trained  # noqa: F401
from torch_bridge.replay import player as player_module
from torch_bridge.replay.player import SEEN, WARM_UP, WARM_UP_ADDING, Player

torch_bridge.register()


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_REPLAY", "all")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 6))


@pytest.mark.parametrize("said", ["0", "1"])
def test_otherwise_only_what_asks(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_REPLAY", said)
    assert not isinstance(net().to("xla").forward, Player)


def test_a_plain_script_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses and weights of op-by-op recording, bit for bit."""
    plain = net().to("xla")
    monkeypatch.setenv("NXD_JAX_REPLAY", "All")
    module = net().to("xla")
    assert run(module, trained(), 6) == run(plain, trained(), 6) and player(module).played


@pytest.fixture
def by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NXD_JAX_REPLAY", raising=False)


@pytest.mark.usefixtures("by_default")
def test_by_default_after_some_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses and weights of op-by-op recording, bit for bit, and no other program when playing begins."""
    monkeypatch.setenv("NXD_JAX_REPLAY", "0")
    plain = net().to("xla")
    monkeypatch.delenv("NXD_JAX_REPLAY")
    module = net().to("xla")
    assert run(module, trained(), WARM_UP + 2) == run(plain, trained(), WARM_UP + 2) and not player(module).played
    compiled = met.metric_data("CompileTime")[0]
    assert run(module, trained(), 6) == run(plain, trained(), 6) and player(module).played
    assert met.metric_data("CompileTime")[0] == compiled


@pytest.mark.usefixtures("by_default")
def test_calls_of_each_kind_are_counted() -> None:
    """A sequence that grows is never looked at; what comes often is, whatever came in between."""
    module = net().to("xla")
    with torch.no_grad():
        for k in range(SEEN + 5):
            module(torch.ones(k + 1, 6, device="xla"))
        assert not player(module)._kinds
        for _ in range(WARM_UP + 3):
            module(torch.ones(2, 6, device="xla"))
            torch_xla.sync()
    assert player(module).played and len(player(module)._kinds) == 1


@pytest.mark.usefixtures("by_default")
def test_all_calls_of_a_step_begin_to_be_played_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients that add up over several calls, playing is another program; a step with calls of both kinds would be a third."""
    monkeypatch.setattr(player_module, "WARM_UP_ADDING", 12)
    module = net().to("xla")
    accumulate(module, 2)
    compiled = met.metric_data("CompileTime")[0]
    accumulate(module, 2)
    assert not player(module).played and met.metric_data("CompileTime")[0] == compiled
    losses = accumulate(module, 6)
    assert player(module).played > 6 and met.metric_data("CompileTime")[0] == compiled + 1
    monkeypatch.setenv("NXD_JAX_REPLAY", "0")
    plain = net().to("xla")
    for steps in (2, 2):
        accumulate(plain, steps)
    assert accumulate(plain, 6) == losses


@pytest.mark.usefixtures("by_default")
@pytest.mark.parametrize("between", ["nothing", "a step"])
def test_gradients_that_add_up_are_recorded_op_by_op_for_longer(between: str) -> None:
    module = net().to("xla")
    accumulate(module, 6, sync=between == "a step")
    compiled = met.metric_data("CompileTime")[0]
    accumulate(module, 4, sync=between == "a step")
    assert met.metric_data("CompileTime")[0] == compiled and not player(module).played
    assert player(module).warm_up == WARM_UP_ADDING


@pytest.mark.usefixtures("by_default")
def test_a_cell_that_is_called_again_and_again_makes_no_other_programs() -> None:
    """In some steps on what the batch has, in others on its own results (teacher forcing): these are two programs, and no more come with the calls."""
    torch.manual_seed(0)
    module = net().to("xla")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(k: int) -> None:
        x, loss = batch(k), torch.zeros((), device="xla")
        out = x
        for _ in range(3):
            out = module(out if k % 2 else x)
            loss = loss + out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch_xla.sync()

    for k in range(4):
        step(k)
    compiled = met.metric_data("CompileTime")[0]
    for k in range(2 * WARM_UP):
        step(k)
    assert met.metric_data("CompileTime")[0] == compiled


def accumulate(module: nn.Module, steps: int, sync: bool = False) -> list[float]:
    """Training with three batches a step."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses: list[float] = []
    for k in range(steps):
        for micro in range(3):
            loss = module(batch(3 * k + micro)).square().mean()
            loss.backward()
            if sync:
                torch_xla.sync()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("by_default")
def test_what_nobody_asked_for_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Meter(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sys.stdout.write("called")
            return super().forward(x)

    module = Meter(6, 6).to("xla")
    caplog.set_level(logging.INFO, "torch_bridge")
    for _ in range(WARM_UP + 1):
        module(batch(0))
        torch_xla.sync()
    assert "write" in player(module).off
    assert [r.levelname for r in caplog.records if "op by op from now on" in r.message] == ["INFO"]
    asked = torch_bridge.optimize(Meter(6, 6)).to("xla")
    asked(batch(0))
    assert [r.levelname for r in caplog.records if "op by op from now on" in r.message] == ["INFO", "WARNING"]


@pytest.mark.usefixtures("by_default")
def test_asking_for_it_begins_at_once() -> None:
    module = net().to("xla")
    torch_bridge.optimize(module)
    run(module, trained(), 5)
    assert player(module).played and isinstance(module.cpu().forward, Player)


@pytest.mark.usefixtures("by_default")
def test_a_forward_that_nobody_asked_to_be_played_is_a_method_to_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(6, 6).to("xla")
    assert module.forward.__func__ is nn.Linear.forward and module.forward.__name__ == "forward" and module.forward.__self__ is module
    torch_bridge.optimize(module)
    assert not hasattr(module.forward, "__func__")
    monkeypatch.setenv("NXD_JAX_REPLAY", "all")
    assert not hasattr(nn.Linear(6, 6).to("xla").forward, "__func__")


@pytest.mark.usefixtures("by_default")
def test_files_hold_no_player() -> None:
    """A pickled module is loaded where there is no torch_bridge."""
    module = nn.Sequential(nn.Linear(2, 2)).to("xla")
    found = io.BytesIO()

    class WithoutTensors(pickle.Pickler):
        def persistent_id(self, x: Any) -> str | None:
            return "t" if isinstance(x, torch.Tensor) else None

    WithoutTensors(found).dump(module)
    assert b"torch_bridge" not in found.getvalue()

    class WithOnes(pickle.Unpickler):
        def persistent_load(self, _: Any) -> Any:
            return nn.Parameter(torch.ones(2, 2))

    loaded = WithOnes(io.BytesIO(found.getvalue())).load()
    assert not isinstance(loaded.forward, Player) and loaded.forward.__self__ is loaded


@pytest.mark.usefixtures("everything")
def test_the_outermost_module_is() -> None:
    module = net().to("xla")
    assert isinstance(module.forward, Player) and not any(isinstance(part.forward, Player) for part in module)
    before = module.forward
    assert module.to(torch.bfloat16).forward is before and module.to("xla").forward is before
    parts = net()
    parts[3].to("xla")
    assert isinstance(parts[3].forward, Player) and not isinstance(parts.forward, Player)
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    assert isinstance(empty.to_empty(device="xla").forward, Player)


@pytest.mark.usefixtures("everything")
def test_what_is_not() -> None:
    """On other devices, without parameters: as they were. A module that leaves xla is as it was too, unless a script has asked for it to be played."""
    assert not isinstance(net().double().forward, Player)
    assert not isinstance(nn.CrossEntropyLoss().to("xla").forward, Player)
    module = net().to("xla")
    assert isinstance(module.forward, Player) and module.cpu()(torch.randn(2, 6)).device.type == "cpu" and "forward" not in vars(module)
    assert isinstance(module.to("xla").forward, Player) and module(batch(0)).device.type == "xla"
    assert not isinstance(torch_bridge.restore(module).forward, Player)
    asked = torch_bridge.optimize(net()).to("xla").cpu()
    assert isinstance(asked.forward, Player)


@pytest.mark.usefixtures("everything")
def test_after_an_error_too() -> None:
    held = nn.Linear(3, 3)
    reference = weakref.ref(held.weight)
    with pytest.raises(RuntimeError, match="cannot move parameter Linear.weight"):
        held.to("xla")
    del reference
    assert isinstance(net().to("xla").forward, Player)


@pytest.mark.usefixtures("everything")
def test_copies_are_played_for_themselves() -> None:
    module = net().to("xla")
    copied: Any = copy.deepcopy(module)
    run(copied, trained(), 5)
    assert player(copied).played and not player(module).played


def test_a_value_that_is_none_of_these(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_REPLAY", "everything")
    with pytest.raises(ValueError, match=r"NXD_JAX_REPLAY='everything': must be 0, 1 \(or false, true\), auto or all"):
        net().to("xla")


def _penalized(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Gradients of a gradient penalty, as critics have it."""
    (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    module.zero_grad()
    slope.norm(2, dim=1).sub(1).square().mean().backward()
    torch_xla.sync()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


@pytest.mark.usefixtures("by_default")
def test_gradients_of_gradients_are_recorded_op_by_op() -> None:
    """Playing would compute the forward pass twice in each step, and in another program whenever a recording is checked."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to("xla")
    x = batch(0).requires_grad_()
    expected = _penalized(module, x).cpu()
    for _ in range(WARM_UP + 2):
        torch.testing.assert_close(_penalized(module, x).cpu(), expected)
    compiled, played = met.metric_data("CompileTime")[0], player(module).played
    for _ in range(12):
        assert _penalized(module, x).cpu().equal(expected)
    assert met.metric_data("CompileTime")[0] == compiled and player(module).played == played <= 1
    assert "gradients of gradients" in player(module).state().reason
    with torch.no_grad():
        for _ in range(WARM_UP + 4):
            module(x)
            torch_xla.sync()
    assert player(module).played > played  # calls of another kind are
