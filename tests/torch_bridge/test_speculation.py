"""Small training steps start before they are recorded: they have torch's numbers, whatever the script does in between."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
import torch_xla.core.xla_builder as xla_builder
from torch import nn, optim

import torch_bridge
from tests import quick
from torch_bridge import metrics
from torch_bridge.config import environment
from torch_bridge.config.settings import SETTINGS
from torch_bridge.device import debug_modes
from torch_bridge.optimizers import group_cache
from torch_bridge.recorder import dispatch
from torch_bridge.runtime import executor, session
from torch_bridge.runtime.in_flight import InFlight

torch_bridge.register()

STEPS = 12
Between = Callable[[int, nn.Module, optim.Optimizer], Any]


@pytest.fixture(autouse=True, scope="module")
def compile_fast() -> Iterator[None]:
    """All runs are compiled alike."""
    with quick.compiling():
        yield


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No program of another test; the devices count as idle, however long they take."""
    executor.clear_cache()
    metrics.clear_counters()
    monkeypatch.setattr(InFlight, "is_idle", lambda self: True)


def early() -> int:
    return metrics.COUNTERS.get("SpeculativeExecution", 0)


def dropped() -> int:
    return metrics.COUNTERS.get("SpeculativeExecutionDropped", 0)


def programs() -> int:
    return metrics.COUNTERS.get("UncachedCompile", 0)


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=0.01)


def train(
    device: str,
    make: Callable[[nn.Module], optim.Optimizer] = adamw,
    behind_forward: Between = lambda *_: None,
    behind_step: Between = lambda *_: None,
    steps: int = STEPS,
    dropout: float = 0.0,
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights of a classifier. What is done behind the forward is done while its program may run already."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 3))
    batches = [(torch.randn(5, 6), torch.randint(0, 3, (5,))) for _ in range(4)]
    model, batches = model.to(device), [tuple(t.to(device) for t in batch) for batch in batches]
    optimizer = make(model)
    torch.manual_seed(1)
    losses = []
    for k in range(steps):
        x, y = batches[k % 4]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        behind_forward(k, model, optimizer)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        behind_step(k, model, optimizer)
    return losses, [p.detach().cpu() for p in model.parameters()]


def same_as_torch(**how: Any) -> None:
    losses, weights = train("xla", **how)
    expected, theirs = train("cpu", **how)
    assert losses == pytest.approx(expected, rel=1e-4)
    for ours, other in zip(weights, theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        adamw,
        lambda m: optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1),
        lambda m: optim.SGD(m.parameters(), lr=0.1),
        lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        lambda m: optim.Adagrad(m.parameters(), lr=0.1, lr_decay=0.1),
        lambda m: optim.AdamW([{"params": [p], "lr": 0.01 * (k + 1)} for k, p in enumerate(m.parameters())]),
    ],
    ids=["adamw", "adam", "sgd", "momentum", "adagrad", "groups"],
)
def test_steps_start_early(make: Callable[[nn.Module], optim.Optimizer]) -> None:
    same_as_torch(make=make)
    assert early() >= STEPS - 4 and not dropped()


def test_numbers_are_those_of_the_ordinary_way(monkeypatch: pytest.MonkeyPatch) -> None:
    losses, weights = train("xla", dropout=0.5)
    assert early() >= STEPS - 4
    executor.clear_cache()
    metrics.clear_counters()
    monkeypatch.setattr(SETTINGS, "speculate", 0)
    expected, others = train("xla", dropout=0.5)
    assert not early() and losses == expected
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_a_schedule_is_foretold() -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        optimizer: Any = adamw(model)
        optimizer.schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return optimizer

    same_as_torch(make=make, behind_step=lambda k, model, optimizer: optimizer.schedule.step())
    assert early() >= STEPS - 4 and not dropped()


def test_a_rate_that_changes_behind_the_forward() -> None:
    def warm_up(k: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.002 * (k + 1)

    same_as_torch(behind_forward=warm_up, steps=30)
    assert not early() and 1 <= dropped() <= 4, "each try waits longer for the next"


def scale(k: int, model: Any, optimizer: optim.Optimizer) -> None:
    if k in (5, 8):
        with torch.no_grad():
            model[3].bias.mul_(0.5)


def swap(k: int, model: Any, optimizer: optim.Optimizer) -> None:
    if k in (5, 8):
        model[0].bias.data = torch.full((8,), float(k)).to(model[0].bias.device)


def decay_more(k: int, model: Any, optimizer: optim.Optimizer) -> None:
    if k == 6:
        optimizer.param_groups[0]["weight_decay"] = 0.5


def forget_moments(k: int, model: Any, optimizer: optim.Optimizer) -> None:
    if k == 6:
        for state in optimizer.state.values():
            state["exp_avg"].zero_()


def load(k: int, model: Any, optimizer: optim.Optimizer) -> None:
    if k == 6:
        model.load_state_dict({name: t * 0.5 for name, t in model.state_dict().items()})


def load_moments(k: int, model: Any, optimizer: optim.Optimizer) -> None:
    if k == 6:
        state = copy.deepcopy(optimizer.state_dict())
        for found in state["state"].values():
            found["step"] += 10
            found["exp_avg"] *= 2
        optimizer.load_state_dict(state)


def count_more(k: int, model: Any, optimizer: optim.Optimizer) -> None:
    if k == 6:
        next(iter(optimizer.state.values()))["step"] += 3


@pytest.mark.parametrize("change", [scale, swap, decay_more, forget_moments, count_more], ids=lambda f: f.__name__)
def test_what_changes_while_a_step_runs(change: Between) -> None:
    same_as_torch(behind_forward=change)
    assert early() and dropped()


@pytest.mark.parametrize("change", [scale, swap, decay_more, forget_moments, load, load_moments, count_more], ids=lambda f: f.__name__)
def test_what_changes_between_steps(change: Between) -> None:
    same_as_torch(behind_step=change, steps=20)
    assert early()


def takes_no_more_programs(monkeypatch: pytest.MonkeyPatch, train: Callable[[], Any]) -> None:
    """What a script compiles depends on the script, not on whether the devices were busy."""
    train()
    assert early() and dropped()
    expected = programs()
    executor.clear_cache()
    metrics.clear_counters()
    monkeypatch.setattr(InFlight, "is_idle", lambda self: False)
    train()
    assert not early() and programs() == expected


def test_what_starts_in_vain_holds_nothing_that_a_new_program_would_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(k: int, model: Any, optimizer: optim.Optimizer) -> None:
        if k == 6:  # other ops in the middle of a step, once, and then every time
            optimizer.param_groups[0]["amsgrad"] = True
            for state in optimizer.state.values():
                state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])

    takes_no_more_programs(monkeypatch, lambda: same_as_torch(behind_forward=keep))


def test_a_validation_that_begins_like_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def train_and_validate() -> None:
        torch.manual_seed(0)
        model = nn.Linear(6, 3).to("xla")
        optimizer, x = adamw(model), torch.randn(5, 6).to("xla")
        for k in range(STEPS):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            if k in (6, 7):
                with torch.no_grad():
                    for p in model.parameters():
                        p.data.mul_(0.99)
                loss.item()
                continue
            loss.backward()
            optimizer.step()
            loss.item()

    takes_no_more_programs(monkeypatch, train_and_validate)


def test_arrays_that_somebody_holds_for_a_while_need_no_program_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InFlight, "is_idle", lambda self: False)
    held: list[Any] = []

    def hold(k: int, model: Any, optimizer: optim.Optimizer) -> None:
        held[:] = [p._storage.array for p in model.parameters() if p.device.type == "xla" and k < 4]

    same_as_torch(behind_forward=hold)
    assert programs() == 1


def test_an_option_that_becomes_a_tensor_is_not_calculated_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arithmetic would be recorded in the middle of the op behind which the program was to start."""
    rates: list[torch.Tensor] = []

    def change(k: int, model: Any, optimizer: optim.Optimizer) -> None:
        if k == 6:
            optimizer.param_groups[0]["lr"] = rates[-1]
        rates.append(torch.tensor(0.02).to(next(model.parameters()).device))

    takes_no_more_programs(monkeypatch, lambda: same_as_torch(behind_step=change))


def test_values_that_are_needed_now_and_then() -> None:
    """A program for each set of them, one structure: tries in vain are counted all the same."""

    def run(device: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3).to(device)
        optimizer, x, kept = adamw(model), torch.randn(5, 6).to(device), []
        losses = []
        for k in range(60):
            optimizer.zero_grad()
            out = model(x)
            loss = out.square().mean()
            loss.backward()
            optimizer.step()
            if k % 3 == 2:
                kept.append(out.detach())
            del out
            losses.append(loss.item())
        return losses + [t.sum().item() for t in kept]

    assert run("xla") == pytest.approx(run("cpu"), rel=1e-4)
    assert 1 <= dropped() <= 4, "each try waits longer for the next"


def test_a_validation_now_and_then_does_not_end_it() -> None:
    """Without dropout it begins as a step does, so that a program starts in vain each time."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).to("xla")
    optimizer, x = adamw(model), torch.randn(5, 6).to("xla")
    for k in range(200):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()
        if k % 20 == 19:
            with torch.no_grad():
                model(x).square().mean().item()
    assert early() > 100 and dropped() <= 10


def test_a_rate_that_changes_every_sixth_step_ends_it() -> None:
    """One step in six that runs twice would cost more than the others gain on a busy machine."""

    def change(k: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
        if k % 6 == 5:
            optimizer.param_groups[0]["lr"] *= 0.99

    same_as_torch(behind_forward=change, steps=120)
    assert early() and dropped() <= 5


def test_what_is_let_go_of_has_no_forecast() -> None:
    """It would keep a program's machine code."""
    train("xla")
    last = session.current().last
    assert last is not None and last.forecast is not None
    executor._evict(session.current(), last)
    assert last.forecast is None


def test_a_function_that_prints_runs_once_a_step() -> None:
    seen: list[float] = []

    def noted(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda v: seen.append(float(v)), x.sum())
        return x * 2

    torch.manual_seed(0)
    model = nn.Linear(6, 3).to("xla")
    optimizer, x = adamw(model), torch.randn(5, 6).to("xla")
    for k in range(STEPS):
        optimizer.zero_grad()
        loss = model(xla_builder.call_jax(noted, (x,))).square().mean()
        if k == 8:
            model.bias.data.mul_(0.5)
        loss.backward()
        optimizer.step()
        loss.item()
    jax.effects_barrier()
    assert len(seen) == STEPS and not early()


def test_a_step_that_takes_another_way() -> None:
    def freeze(k: int, model: Any, optimizer: optim.Optimizer) -> None:
        if k == 7:
            for p in model[0].parameters():
                p.requires_grad_(False)
        if k == 13:
            model[0].weight.requires_grad_(True)

    same_as_torch(behind_step=freeze, steps=20)
    assert early()


def test_folded_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of equal layers are rows of one array, which the program takes and gives."""
    monkeypatch.setenv("NXD_JAX_FOLD", "3")

    def run(device: str) -> list[float]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())]).to(device)
        optimizer, x = adamw(model), torch.randn(4, 8).to(device)
        losses = []
        for k in range(STEPS):
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if k == 6:
                with torch.no_grad():
                    model[6].weight.mul_(0.5)
        return losses

    assert run("xla") == pytest.approx(run("cpu"), rel=1e-4)
    assert early() and any(p.spec.plan is not None and p.spec.keeps_inputs for p in session.current().recent)


def test_values_that_somebody_keeps_stay() -> None:
    kept: list[Any] = []
    train("xla", behind_step=lambda k, model, optimizer: kept.append(model[0].weight.detach().clone()))
    expected: list[Any] = []
    train("cpu", behind_step=lambda k, model, optimizer: expected.append(model[0].weight.detach().clone()))
    assert early()
    for copied, theirs in zip(kept, expected, strict=True):
        torch.testing.assert_close(copied.cpu(), theirs, rtol=1e-4, atol=1e-5)


def test_nothing_starts_while_the_devices_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InFlight, "is_idle", lambda self: False)
    same_as_torch()
    assert not early() and not dropped()


def test_one_variable_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_SPECULATE", "0")
    for field in dataclasses.fields(SETTINGS):
        monkeypatch.setattr(SETTINGS, field.name, getattr(SETTINGS, field.name))
    debug_modes.configure(environment.check(), dispatch.dispatch)
    same_as_torch()
    assert not early() and not dropped()


def test_large_steps_take_their_buffers_over(monkeypatch: pytest.MonkeyPatch) -> None:
    train("xla")
    assert not session.current().recent[-1].spec.ports.donated
    executor.clear_cache()
    monkeypatch.setattr(SETTINGS, "speculate", 0)
    train("xla")
    assert any(p.spec.ports.donated for p in session.current().recent)
    assert not any(p.spec.keeps_inputs for p in session.current().recent)


def test_stochastic_rounding_takes_its_random_words_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1")
    train("xla")
    assert not early() and not dropped()
    assert os.environ["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == "1"


def test_an_error_in_a_forecast_is_no_error_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> float:
        raise ArithmeticError("no number")

    monkeypatch.setattr(group_cache.Counters, "next", fail)
    same_as_torch()
    assert not early() and dropped()


def test_an_optimizer_that_begins_anew() -> None:
    def anew(k: int, model: Any, optimizer: Any) -> None:
        if k % 6 == 5:
            optimizer.__dict__.update(adamw(model).__dict__)

    same_as_torch(behind_step=anew, steps=20)
    assert early()


def test_an_optimizer_that_is_gone() -> None:
    """What says its numbers does not keep it alive."""
    train("xla")
    (forecast,) = [t.forecast for t in session.current().traces.values() if t.forecast is not None and t.forecast.foretold]
    assert [foretell() for foretell in forecast.foretold.values()] == [None]
    train("xla")
    assert early()


def test_two_models_in_turn() -> None:
    def run(device: str) -> list[float]:
        torch.manual_seed(0)
        models = [nn.Linear(4, 4).to(device) for _ in range(2)]
        optimizers = [adamw(m) for m in models]
        x = torch.randn(3, 4).to(device)
        losses = []
        for _ in range(STEPS):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    assert run("xla") == pytest.approx(run("cpu"), rel=1e-4)
