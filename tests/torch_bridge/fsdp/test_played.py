"""Wrapped modules are played from recordings, with the numbers of those that are not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch_xla.distributed.fsdp import checkpoint_module

from tests.torch_bridge.fsdp.models import adam, batch, nested, net, train, whole
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.runtime import executor


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(("flatten", "checkpoints"), [(True, False), (False, False), (False, True), (True, True)])
def test_numbers_of_played_modules(flatten: bool, checkpoints: bool, hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    hosted(2)
    found = []
    for switch in ("0", "all"):
        monkeypatch.setenv("NXD_JAX_REPLAY", switch)
        inner: Any = checkpoint_module if checkpoints else lambda m: m
        model = nested(net(), inner, flatten_parameters=flatten, disable_reshard_on_root=False)
        found.append((train(model, adam(model), range(6)), whole(model)))
        played = getattr(model.forward, "played", 0)
        assert played == (0 if switch == "0" else 3), getattr(model.forward, "state", str)()
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][k], v) for k, v in found[1][1].items())


def test_without_synchronizing_it_is_recorded_op_by_op(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where gradients are kept for later, which a recording would not do; afterwards it is played again."""
    monkeypatch.setenv("NXD_JAX_REPLAY", "all")
    hosted(2)
    grads = []
    with caplog.at_level(logging.WARNING):
        for accumulate in (False, True):
            model: Any = nested(net())
            for k in range(9):
                model.zero_grad()
                if accumulate and k % 4 == 2:
                    with model.no_sync():
                        model(batch(k)).backward()
                else:
                    model(batch(k)).backward()
                executor.sync()
            grads.append([p.grad.cpu() for p in model.parameters()])
            assert model.forward.state().reason == ""
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert not caplog.records


def test_modules_around_and_evaluation(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_REPLAY", "all")
    hosted(2)
    model: Any = nested(net())
    around: Any = nn.ModuleDict({"model": model})
    around.eval()
    with torch.no_grad():
        losses = [model(batch(0)).item() for _ in range(5)]
    assert model.forward.played >= 2 and len(set(losses)) == 1
    around.train()
    assert model(batch(0)).item() == pytest.approx(losses[0])
