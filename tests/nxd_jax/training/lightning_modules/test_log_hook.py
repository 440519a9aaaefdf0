"""Overrides of `log_metrics`: each number under its name, whatever form the override has."""

from __future__ import annotations

from typing import Any

import pytest

from nxd_jax.training.lightning_modules.model import log_hook
from nxd_jax.training.lightning_modules.model.base import BaseModelModule
from tests.nxd_jax.training import small

NUMBERS = {name: f"the {name}" for name in log_hook.NEWEST}
SEEN: dict[str, Any] = {}


def newest(log_fn, loss_mean, misc_metrics, lr, global_step, consumed_samples, grad_norm, param_norm, throughput, throughput_peak, trainer):  # type: ignore[no-untyped-def]
    SEEN.update(locals())


def older(log_fn, loss_mean, lr, global_step, consumed_samples, grad_norm, param_norm, throughput, throughput_peak, full_log, trainer):  # type: ignore[no-untyped-def]
    SEEN.update(locals())


def other_names(log, loss, misc_metrics, lr, step, samples, grad, param, throughput, peak, trainer):  # type: ignore[no-untyped-def]
    SEEN.update(loss_mean=loss, misc_metrics=misc_metrics, lr=lr, global_step=step, consumed_samples=samples, throughput_peak=peak)


def older_with_other_names(log, loss, lr, step, samples, grad, param, speed, peak, full_log, trainer):  # type: ignore[no-untyped-def]
    SEEN.update(loss_mean=loss, lr=lr, global_step=step, consumed_samples=samples, throughput_peak=peak, full_log=full_log, trainer=trainer)


def by_position(*args):  # type: ignore[no-untyped-def]
    SEEN.update(zip(log_hook.NEWEST, args, strict=True))


def by_name(**numbers):  # type: ignore[no-untyped-def]
    SEEN.update(numbers)


def some(global_step, lr, **rest):  # type: ignore[no-untyped-def]
    SEEN.update(rest, lr=lr, global_step=global_step)


def few(trainer, lr):  # type: ignore[no-untyped-def]
    SEEN.update(lr=lr, trainer=trainer)


@pytest.mark.parametrize("hook", [newest, older, other_names, older_with_other_names, by_position, by_name, some, few])
@pytest.mark.parametrize("full_log", [True, False])
def test_each_number_under_its_name(hook: Any, full_log: bool) -> None:
    SEEN.clear()
    log_hook.call(hook, NUMBERS, full_log)
    has_full_log = hook in (older, older_with_other_names)
    assert bool(SEEN) == (full_log or has_full_log)
    assert SEEN.pop("full_log", full_log) is full_log
    assert {name: NUMBERS[name] for name in SEEN} == SEEN
    assert not SEEN or {"lr"} <= set(SEEN)


def test_an_override_that_cannot_be_called() -> None:
    def hook(log_fn, loss):  # type: ignore[no-untyped-def]
        pass

    with pytest.raises(
        TypeError, match=r"log_metrics\(log_fn, loss\) cannot be called: it must take \(log_fn, loss_mean, misc_metrics, lr"
    ):
        log_hook.call(hook, NUMBERS, True)


class Named(small.Module):
    """An override as the original's users write it, with all the arguments of its newest release."""

    kept: list[dict[str, Any]]

    def log_metrics(
        self,
        log_fn: Any,
        loss_mean: Any,
        misc_metrics: Any,
        lr: Any,
        global_step: Any,
        consumed_samples: Any,
        grad_norm: Any,
        param_norm: Any,
        throughput: Any,
        throughput_peak: Any,
        trainer: Any,
    ) -> None:
        self.kept = [
            *getattr(self, "kept", []),
            {name: value for name, value in locals().items() if name not in ("self", "log_fn", "__class__")},
        ]

    def model_fwd_calc_loss(self, batch: Any) -> Any:
        return super().model_fwd_calc_loss(batch), {"twice": 2 * super().model_fwd_calc_loss(batch).detach()}


@pytest.mark.core(keep=0)
@pytest.mark.usefixtures("ranks", "variables")
def test_a_training_calls_it_with_the_original_s_arguments() -> None:
    """Called for steps that are logged; names of checkpoints and the throughput do not depend on it."""
    trainer, module = small.train("trainer.log_every_n_steps=2", "trainer.max_steps=3", module=Named)
    assert [kept["global_step"] for kept in module.kept] == [0.0, 2.0]
    assert [kept["consumed_samples"] for kept in module.kept] == [8.0, 24.0]
    assert [kept["lr"] for kept in module.kept] == pytest.approx([0.0, 0.005])
    last = module.kept[-1]
    assert last["trainer"] is trainer and last["throughput_peak"] >= last["throughput"] > 0
    assert float(last["misc_metrics"]["twice"]) == pytest.approx(2 * float(last["loss_mean"]), rel=1e-4)
    assert last["grad_norm"] is module._optimizer.grad_norm and float(last["grad_norm"]) > 0
    assert float(last["param_norm"]) == pytest.approx(float(module.calculate_parameter_norm(module.parameters())), rel=1e-5)
    found = trainer.callback_metrics
    assert (float(found["global_step"]), float(found["consumed_samples"])) == (2.0, 24.0)
    assert float(found["throughput"]) > 0 and "reduced_train_loss" not in found


def test_the_order_of_first_releases_is_refused_above() -> None:
    module: Any = object.__new__(small.Module)
    older = dict.fromkeys(log_hook.OLDER, 1.0)
    with pytest.raises(TypeError, match=r"misc_metrics must be a dict or None, got float: it stands between loss_mean and lr"):
        BaseModelModule.log_metrics(module, *older.values())
