"""`to_optax` with a scheduler: torch's learning rates and momenta at every step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
import transformers
from torch import nn, optim
from torch.optim import lr_scheduler

import torch_bridge
from torch_bridge import _compat
from torch_bridge.export import optax_schedules

torch_bridge.register()

STEPS = 45


class Case(NamedTuple):
    """make(optimizer) gives the scheduler. steps: what to_optax is told; None: it goes on for ever. ahead: torch's steps before."""

    make: Callable[[Any], Any]
    steps: int | None = None
    optimizer: Callable[[Any], Any] = lambda p: optim.SGD(p, lr=0.1)
    ahead: int = 0
    every: int = 1


def _sgd(p: Any) -> optim.Optimizer:
    return optim.SGD(p, lr=0.1, momentum=0.5)


def _adamw(p: Any) -> optim.Optimizer:
    return optim.AdamW(p, lr=0.1)


def _sequence(o: Any) -> Any:
    warm_up = lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=5)
    return lr_scheduler.SequentialLR(o, [warm_up, lr_scheduler.CosineAnnealingLR(o, T_max=9), lr_scheduler.StepLR(o, 4, 0.5)], [5, 20])


def _chain(o: Any) -> Any:
    parts = [lr_scheduler.ConstantLR(o, factor=0.5, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 4, 0.8)]
    return lr_scheduler.ChainedScheduler(parts, optimizer=o)


class _Own(lr_scheduler.LRScheduler):
    """Changes weight decay as well."""

    def get_lr(self) -> list[Any]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 / (1 + self.last_epoch)
        return [0.1 / (1 + self.last_epoch) ** 0.5 for _ in self.optimizer.param_groups]


CASES = {
    "lambda": Case(lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k)), steps=STEPS),
    "lambda-ahead": Case(lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k)), steps=STEPS, ahead=7),
    "multiplicative": Case(lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.9), steps=STEPS),
    "step": Case(lambda o: lr_scheduler.StepLR(o, 7, 0.5)),
    "step-ahead": Case(lambda o: lr_scheduler.StepLR(o, 7, 0.5), ahead=5),
    "step-every": Case(lambda o: lr_scheduler.StepLR(o, 2, 0.5), every=5),
    "multistep": Case(lambda o: lr_scheduler.MultiStepLR(o, [3, 11, 11], 0.5)),
    "constant": Case(lambda o: lr_scheduler.ConstantLR(o, factor=0.5, total_iters=4)),
    "linear": Case(lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=10)),
    "linear-fraction": Case(lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=10.5)),
    "linear-ahead": Case(lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=10), ahead=14),
    "exponential": Case(lambda o: lr_scheduler.ExponentialLR(o, 0.93)),
    "polynomial": Case(lambda o: lr_scheduler.PolynomialLR(o, total_iters=12, power=2.0)),
    "cosine": Case(lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10, eta_min=0.01)),
    "cosine-ahead": Case(lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10), ahead=13),
    "cosine-steps": Case(lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10), steps=STEPS),
    "restarts": Case(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=8, eta_min=0.01)),
    "restarts-longer": Case(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=5, T_mult=2), steps=STEPS),
    "onecycle": Case(lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=STEPS + 1), optimizer=_sgd),
    "onecycle-betas": Case(lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=60, three_phase=True), optimizer=_adamw),
    "cyclic": Case(lambda o: lr_scheduler.CyclicLR(o, base_lr=0.1, max_lr=0.4, step_size_up=4, step_size_down=7), optimizer=_sgd),
    "cyclic-2": Case(lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.4, 4, mode="triangular2", cycle_momentum=False), steps=STEPS),
    "cyclic-range": Case(lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.4, 4, mode="exp_range", gamma=0.9), steps=STEPS, optimizer=_adamw),
    "cyclic-own": Case(lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.4, 4, scale_fn=lambda x: 1 / x, cycle_momentum=False), steps=STEPS),
    "sequential": Case(_sequence),
    "chained": Case(_chain),
    "chained-cosine": Case(
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.CosineAnnealingLR(o, 6, 0.01), lr_scheduler.ExponentialLR(o, 0.9)]),
        steps=STEPS,
    ),
    "own": Case(_Own, steps=STEPS, optimizer=lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.5)),
    "hf-constant": Case(lambda o: transformers.get_constant_schedule_with_warmup(o, 5), steps=STEPS),
    "hf-linear": Case(lambda o: transformers.get_linear_schedule_with_warmup(o, 5, 40), steps=STEPS),
    "hf-cosine": Case(lambda o: transformers.get_cosine_schedule_with_warmup(o, 5, 40), steps=STEPS),
    "hf-polynomial": Case(lambda o: transformers.get_polynomial_decay_schedule_with_warmup(o, 5, 40, lr_end=1e-3), steps=STEPS),
    "hf-inverse-root": Case(lambda o: transformers.get_inverse_sqrt_schedule(o, 5), steps=STEPS),
    "tensor-lr": Case(lambda o: lr_scheduler.StepLR(o, 7, 0.5), optimizer=lambda p: optim.SGD(p, lr=torch.tensor(0.1))),
}


def started(case: Case) -> tuple[nn.ParameterList, Any, Any]:
    """One parameter, after torch's steps; its gradient is always 1."""
    model = nn.ParameterList([nn.Parameter(torch.ones((), dtype=torch.float64))])
    optimizer = case.optimizer(model.parameters())
    scheduler = case.make(optimizer)
    in_torch(model, optimizer, scheduler, range(case.ahead), case.every)
    return model, optimizer, scheduler


def in_torch(model: Any, optimizer: Any, scheduler: Any, steps: range, every: int = 1) -> list[float]:
    """The parameter after each step."""
    found = []
    for k in steps:
        model[0].grad = torch.ones((), dtype=torch.float64)
        optimizer.step()
        if (k + 1) % every == 0:
            scheduler.step()
        found.append(model[0].item())
    optimizer.zero_grad()
    return found


@functools.cache
def in_jax() -> dict[str, list[float]]:
    """The same of all cases, in one program."""
    with _compat.enable_x64():
        txs, params, states = {}, {}, {}
        for name, case in CASES.items():
            model, optimizer, scheduler = started(case)
            txs[name] = torch_bridge.to_optax(optimizer, scheduler, model=model, steps=case.steps, every=case.every)
            params[name] = torch_bridge.to_jax(model).params
            states[name] = txs[name].init(params[name])

        def step(carried: Any, _: Any) -> Any:
            params, states = carried
            ones = {"0": jnp.ones((), jnp.float64)}
            stepped = {name: tx.update(ones, states[name], params[name]) for name, tx in txs.items()}
            params = {name: optax.apply_updates(params[name], u) for name, (u, _) in stepped.items()}
            return (params, {name: s for name, (_, s) in stepped.items()}), {name: p["0"] for name, p in params.items()}

        _, found = jax.jit(lambda carried: jax.lax.scan(step, carried, length=STEPS))((params, states))
        return {name: values.tolist() for name, values in found.items()}


@pytest.mark.parametrize("name", CASES)
def test_learning_rates(name: str) -> None:
    """To the last digits, also long after the scheduler has come to rest or begun again."""
    expected = in_torch(*started(CASES[name]), range(STEPS), CASES[name].every)
    tolerance = 1e-7 if name == "tensor-lr" else 1e-11  # torch's lr is a float32
    assert in_jax()[name] == pytest.approx(expected, rel=tolerance, abs=tolerance)


def test_a_short_float32_run() -> None:
    """Geometric tails keep their digits after many steps."""
    table = optax_schedules.Table(jnp.array([0.1]), 0, optax_schedules.Tail(0, 1, 0.999))  # type: ignore[arg-type]
    assert float(table(3000)) == pytest.approx(0.1 * 0.999**3000, rel=1e-6)


# -- ends ------------------------------------------------------------------------------------------------


def transformation(make: Callable[[Any], Any], **options: Any) -> tuple[Any, Any, Any]:
    params = {"0": jnp.ones(())}
    optimizer = optim.SGD([nn.Parameter(torch.ones(()))], lr=0.1)
    tx = torch_bridge.to_optax(optimizer, make(optimizer), **options)
    return tx, params, tx.init(params)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.LambdaLR(o, lambda k: 1.0),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=5, T_mult=2),
        lambda o: lr_scheduler.StepLR(o, 5, gamma=0.0),
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=2.3),
        lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, 4, mode="triangular2", cycle_momentum=False),
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.StepLR(o, 3), lr_scheduler.LambdaLR(o, lambda k: 1.0)], [3]),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.CosineAnnealingLR(o, 6, 0.01), lr_scheduler.ExponentialLR(o, 0.9)]),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 6), lr_scheduler.LambdaLR(o, lambda k: 1.0)]),
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10_000_000),
    ],
)
def test_schedulers_without_a_pattern(make: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"may go on for ever without repeating itself: say how many .* to_optax\(\.\.\., steps=10_000\)"):
        transformation(make)


def test_a_pattern_that_somebody_broke() -> None:
    """A learning rate set by hand: it would change where the cosine begins again."""

    def make(optimizer: Any) -> Any:
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        optimizer.param_groups[0]["lr"] = 0.05
        return scheduler

    with pytest.raises(ValueError, match="CosineAnnealingLR may go on for ever"):
        transformation(make)


def test_beyond_the_steps() -> None:
    """Not silently the last learning rate: an error, or NaN in a compiled program."""
    tx, params, state = transformation(lambda o: lr_scheduler.LambdaLR(o, lambda k: 1.0), steps=2)
    for _ in range(3):  # the last is that which the scheduler has after two steps
        updates, state = tx.update(params, state, params)
        assert float(updates["0"]) == pytest.approx(-0.1)
    with pytest.raises(ValueError, match="tabulated from its step 0 to 2, and this is step 3: pass a larger `steps`"):
        tx.update(params, state, params)
    updates, _ = jax.jit(tx.update)(params, state, params)
    assert bool(jnp.isnan(updates["0"]))


def test_before_the_steps() -> None:
    """A state of earlier steps than those that were tabulated."""
    optimizer = optim.SGD([nn.Parameter(torch.ones(()))], lr=0.1)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda k: 1.0)
    params = {"0": jnp.ones(())}
    early = torch_bridge.to_optax(optimizer, scheduler, steps=5).init(params)
    optimizer.step()
    scheduler.step()
    tx = torch_bridge.to_optax(optimizer, scheduler, steps=5)
    with pytest.raises(ValueError, match="from its step 1 to 6, and this is step 0"):
        tx.update(params, early, params)


def test_the_end_of_one_cycle() -> None:
    """torch has no more steps then, whatever was asked for."""
    for options in ({}, {"steps": 1000}):
        tx, params, state = transformation(lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=4, cycle_momentum=False), **options)
        for _ in range(5):
            _, state = tx.update(params, state, params)
        with pytest.raises(ValueError, match="step 0 to 4, and this is step 5"):
            tx.update(params, state, params)


# -- what is refused ---------------------------------------------------------------------------------------


def test_schedulers_that_depend_on_the_loss() -> None:
    with pytest.raises(TypeError, match=r"depends on the loss.*optax\.contrib\.reduce_on_plateau"):
        transformation(lr_scheduler.ReduceLROnPlateau)


def test_schedulers_of_other_kinds() -> None:
    with pytest.raises(TypeError, match=r"must be a torch.optim.lr_scheduler.LRScheduler, got function.*optax.scale_by_schedule"):
        transformation(lambda o: lambda step: 0.1)


def test_the_scheduler_of_another_optimizer() -> None:
    other = optim.SGD([nn.Parameter(torch.ones(()))], lr=0.1)
    with pytest.raises(ValueError, match="the StepLR schedules another optimizer than the SGD"):
        transformation(lambda o: lr_scheduler.StepLR(other, 1))


def test_options_that_a_scheduler_switches() -> None:
    class Switching(_Own):
        def get_lr(self) -> list[Any]:
            self.optimizer.param_groups[0]["nesterov"] = self.last_epoch > 1
            return super().get_lr()

    optimizer = optim.SGD([nn.Parameter(torch.ones(()))], lr=0.1, momentum=0.9)
    with pytest.raises(NotImplementedError, match=r"turns an option of param_groups\[0\] on or off: \['nesterov'\]"):
        torch_bridge.to_optax(optimizer, Switching(optimizer), steps=5)


def test_errors_of_a_scheduler_reach_the_caller() -> None:
    def factor(k: int) -> float:
        if k > 3:
            raise ValueError("no more")
        return 1.0

    with pytest.raises(ValueError, match="^no more$"):
        transformation(lambda o: lr_scheduler.LambdaLR(o, factor), steps=10)


def test_the_scheduler_stays_where_it_is() -> None:
    optimizer = optim.AdamW([nn.Parameter(torch.ones(()))], lr=0.1)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=9)
    before = {**optimizer.param_groups[0]}, scheduler.state_dict()
    torch_bridge.to_optax(optimizer, scheduler)
    assert ({**optimizer.param_groups[0]}, scheduler.state_dict()) == before


@pytest.mark.parametrize(("option", "text"), [("steps", "steps to come, at least 1, got 0"), ("every", "to the next, at least 1, got 0")])
def test_numbers_that_make_no_sense(option: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        transformation(lambda o: lr_scheduler.StepLR(o, 1), **{option: 0})
