"""`NXD_JAX_REPLAY=all`: modules that are moved to xla are played."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import torch_bridge
from tests.torch_bridge.replaying import batch, compile_fast, player, run, trained  # noqa: F401
from torch_bridge.replay.player import Player

torch_bridge.register()


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_REPLAY", "all")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 6))


@pytest.mark.parametrize("said", ["", "0", "1"])
def test_otherwise_only_what_asks(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_REPLAY", said)
    assert not isinstance(net().to("xla").forward, Player)


def test_a_plain_script_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses and weights of op-by-op recording, bit for bit."""
    plain = net().to("xla")
    monkeypatch.setenv("NXD_JAX_REPLAY", "All")
    module = net().to("xla")
    assert run(module, trained(), 6) == run(plain, trained(), 6) and player(module).played


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
    with pytest.raises(RuntimeError, match="lazy parameter"):
        nn.LazyLinear(3).to("xla")
    assert isinstance(net().to("xla").forward, Player)


@pytest.mark.usefixtures("everything")
def test_copies_are_played_for_themselves() -> None:
    module = net().to("xla")
    copied: Any = copy.deepcopy(module)
    run(copied, trained(), 5)
    assert player(copied).played and not player(module).played


def test_a_value_that_is_none_of_these(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_REPLAY", "everything")
    with pytest.raises(ValueError, match=r"NXD_JAX_REPLAY='everything': must be 0, 1 \(or false, true\) or all"):
        net().to("xla")
