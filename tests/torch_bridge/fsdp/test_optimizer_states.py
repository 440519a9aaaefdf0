"""Optimizer state that goes on with another number of ranks, and with other options."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP
from torch_xla.distributed.fsdp import consolidate_sharded_model_checkpoints, consolidate_sharded_optimizer_states

from tests.torch_bridge.fsdp.models import Net, adam, alone, nested, net, train, whole
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.collectives import object_collectives

OPTIONS: dict[str, dict[str, Any]] = {"": {}, "rows": {"shard_param_on_dim_0": True}, "flat": {"flatten_parameters": True}}


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """As transformers' Trainer: those with weight decay, and biases and norms, which become one group where they are one vector."""
    params = list(model.named_parameters())
    decayed = [p for name, p in params if "bias" not in name and "norm" not in name]
    others = [p for name, p in params if "bias" in name or "norm" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.02)


def continued(ranks: tuple[int, int], optimize: Any = adam) -> Any:
    """Losses, and the state, of one device: two steps of the first number of ranks' batches, and two of the second's."""
    model = net()
    made = optimize(model)
    first, _ = alone(model, ranks[0], range(2), lambda m: made)
    second, state = alone(model, ranks[1], range(2, 4), lambda m: made)
    return first + second, state


CASES = [
    (before, after, optimize, ranks)
    for before, after in (("", "flat"), ("rows", ""), ("flat", "rows"), ("flat", "flat"), ("", ""))
    for ranks in ((4, 2), (4, 1), (2, 4))
    for optimize in ((adam, two_groups) if "flat" not in (before, after) else (adam,))
]


@pytest.mark.thorough(keep=6)
@pytest.mark.core(keep=1)
@pytest.mark.parametrize(("before", "after", "optimize", "ranks"), CASES)
def test_goes_on(before: str, after: str, optimize: Any, ranks: tuple[int, int], hosted: Hosted, tmp_path: pathlib.Path) -> None:
    expected = continued(ranks, optimize)
    hosted(ranks[0])
    model = nested(net(), **OPTIONS[before])
    optimizer = optimize(model)
    losses = train(model, optimizer, range(2))
    ckpt = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata(optimizer), "optimizer": optimizer.state_dict()}  # type: ignore[operator]
    xm.save(ckpt, tmp_path / f"a_rank-{xm.get_ordinal()}.pth", master_only=False)
    hosted(ranks[1])
    _, path = consolidate_sharded_model_checkpoints(str(tmp_path / "a"))
    state = torch.load(str(path), weights_only=True)
    plain = Net()
    plain.load_state_dict(state["model"])
    again: Any = nested(plain, **OPTIONS[after])
    optimizer = optimize(again)
    optimizer.load_state_dict(again.cut_optimizer_state(state["optimizer"], optimizer))
    losses += train(again, optimizer, range(2, 4))
    for mine, other in zip(losses, expected[0], strict=True):
        assert mine == pytest.approx(other, rel=1e-4)
    found = whole(again) if ranks[1] > 1 else {k: v.cpu() for k, v in again.state_dict().items()}
    for name, value in expected[1].items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


def test_one_ranks_state_is_not_everyones(hosted: Hosted) -> None:
    hosted(2)
    model: Any = FSDP(nn.Linear(3, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    model(torch.ones(2, 3, device="xla")).sum().backward()
    optimizer.step()
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"given one rank's state of a shard \(shape .*hosts 2 ranks.*each_rank.*cut_optimizer_state"):
        optimizer.load_state_dict(_states(optimizer)[1])
    one = _states(optimizer)[1]
    on_device = {k: {name: v.to("xla") for name, v in of.items()} for k, of in one["state"].items()}  # torch.load(..., map_location="xla")
    with pytest.raises(ValueError, match="given one rank's state of a shard"):
        optimizer.load_state_dict({**one, "state": on_device})
    optimizer.load_state_dict(before)  # as it lies on the device
    plain = torch.optim.SGD(nn.Linear(3, 4).to("xla").parameters(), lr=1.0, momentum=0.5)
    plain.load_state_dict({"state": {0: {"momentum_buffer": torch.ones(4, 3)}}, "param_groups": plain.state_dict()["param_groups"]})
    assert plain.state_dict()["state"][0]["momentum_buffer"].sum().item() == 12


def _states(optimizer: torch.optim.Optimizer) -> list[Any]:
    return object_collectives.each_ranks(optimizer.state_dict())


def test_names_and_values(hosted: Hosted) -> None:
    """Of the moments of whole parameters, those that lie in one vector each by itself; a parameter that all ranks have whole stays as it is."""
    hosted(2)
    model: Any = FSDP(nn.Linear(3, 4), flatten_parameters=True)
    model.added = nn.Linear(1, 1, bias=False).to("xla")
    optimizer = torch.optim.SGD(model.named_parameters(), lr=1.0, momentum=0.5)
    model(torch.ones(2, 3, device="xla")).sum().backward()
    model.added(torch.ones(2, 1, device="xla")).sum().backward()
    optimizer.step()
    states = _states(optimizer)
    state = consolidate_sharded_optimizer_states(states, model.get_shard_metadata())  # the optimizer knows names itself
    assert {k: v["momentum_buffer"].tolist() for k, v in state["state"].items()} == {
        "weight": [[2.0] * 3] * 4,
        "bias": [2.0] * 4,
        "added.weight": [[2.0]],
    }
    assert state["param_groups"][0]["params"] == ["weight", "bias", "added.weight"] and state["param_groups"][0]["momentum"] == 0.5
    assert model.get_shard_metadata(optimizer)["optim_info"] == [name for name, _ in model.named_parameters()]
    cut = model.cut_optimizer_state(state, optimizer)
    assert cut["param_groups"][0]["params"] == [0, 1]
    assert [torch.equal(cut["state"][k]["momentum_buffer"].cpu(), states[0]["state"][k]["momentum_buffer"]) for k in (0, 1)] == [True, True]


def test_what_cannot_be_joined(hosted: Hosted, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    hosted(2)
    model = FSDP(nn.Linear(3, 4), shard_param_on_dim_0=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    model(torch.ones(2, 3, device="xla")).sum().backward()
    optimizer.step()
    states, named = _states(optimizer), model.get_shard_metadata(optimizer)
    buffer = states[0]["state"][0]["momentum_buffer"]

    def changed(**more: Any) -> list[Any]:
        return [states[0], {**states[1], "state": {**states[1]["state"], 0: {**states[1]["state"][0], **more}}}]

    every = [{**s, "state": {0: {"row": buffer[:, 0]}}} for s in states]
    for given, metadata, text in [
        (states[:1], named, "among 2 ranks, got 1 optimizer states: give every rank's"),
        (
            states,
            model.get_shard_metadata(),
            r"does not say which of its 2 parameters is which: save model.get_shard_metadata\(optimizer\)",
        ),
        (
            states,
            {**named, "optim_info": ["_fsdp_shard.nothing", "b"]},
            "is not in the shard metadata: the optimizer's state is of another model",
        ),
        (changed(momentum_buffer=None), named, "is not in every rank's file: they are of different steps"),
        (
            every,
            named,
            r"'row' of .* has shape \[2\], which is no part of \[4, 3\] for each of 2 ranks: what this optimizer keeps of a shard cannot be joined",
        ),
        (
            [{**s, "state": {0: {"step": k}}} for k, s in enumerate(states)],
            named,
            "differs from rank to rank, and is no part of the parameter",
        ),
    ]:
        with pytest.raises(ValueError, match=text):
            consolidate_sharded_optimizer_states(given, metadata)
    ckpt = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata(), "optimizer": optimizer.state_dict()}
    xm.save(ckpt, tmp_path / f"a_rank-{xm.get_ordinal()}.pth", master_only=False)
    _, path = consolidate_sharded_model_checkpoints(str(tmp_path / "a"))
    assert list(torch.load(str(path))) == ["model"] and "the model is joined, without its optimizer's state" in caplog.text


def test_what_cannot_be_cut(hosted: Hosted) -> None:
    hosted(2)
    model = FSDP(nn.Linear(3, 4), flatten_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    moments = {"momentum_buffer": torch.zeros(4, 3)}
    groups = [{"lr": 1.0, "params": ["weight"]}, {"lr": 2.0, "params": ["bias"]}]
    for state, given, text in [
        ({}, groups[:1], "has nothing of bias: it is of another model"),
        ({}, groups, "parameters of group 0 were in several groups when the state was saved"),
        ({"weight": moments}, [{"params": ["weight", "bias"]}], "has 1 of 2 parameters that are one vector here"),
    ]:
        with pytest.raises(ValueError, match=text):
            model.cut_optimizer_state({"state": state, "param_groups": given}, optimizer)
    with pytest.raises(ValueError, match="1 of the optimizer's 1 parameters are not in this module: make the optimizer after wrapping"):
        model.get_shard_metadata(torch.optim.SGD(nn.Linear(1, 1, bias=False).parameters()))
    with pytest.raises(ValueError, match="has nothing of a parameter that is not in the model"):
        model.cut_optimizer_state({"state": {}, "param_groups": groups}, torch.optim.SGD(nn.Linear(1, 1).parameters()))
