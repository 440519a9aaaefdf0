"""Lightning's own behaviour under our strategy: hooks, validation, limits and ends are those of a plain Trainer on the CPU; so are the numbers."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from neuronx_distributed.trainer import initialize_parallel_model
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping

from tests.nxd_jax.lightning import jobs
from torch_bridge.precision import device_formats

pytestmark = jobs.MARKS


class Calls(Callback):
    """Remembers which hooks were called, and at what steps and epochs."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []


def _noting(name: str) -> Callable[..., None]:
    def hook(self: Calls, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self.calls.append((name, trainer.global_step, trainer.current_epoch))

    return hook


for _name, _ in inspect.getmembers(Callback, inspect.isfunction):
    if _name in ("setup", "teardown") or (_name.startswith("on_") and "checkpoint" not in _name):
        setattr(Calls, _name, _noting(_name))


# -- hooks -------------------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {"max_epochs": 2, "val_check_interval": 5},
    {"val_check_interval": 0.5, "limit_val_batches": 0.25},
    {"max_epochs": 4, "check_val_every_n_epoch": 2, "limit_train_batches": 3},
    {"max_steps": 7, "check_val_every_n_epoch": None, "val_check_interval": 3, "limit_train_batches": 5},
    {"num_sanity_val_steps": 2, "limit_train_batches": 0.5},
    {"fast_dev_run": 3},
    {"limit_val_batches": 0, "max_epochs": 2, "min_steps": 30},
    {"max_epochs": 2, "accumulate_grad_batches": 5, "limit_val_batches": 1},
    {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2, "limit_train_batches": 4, "limit_val_batches": 1},
    {"detect_anomaly": True, "max_steps": 2, "inference_mode": False},
    {"profiler": "simple", "limit_train_batches": 2, "limit_val_batches": 1},
]


@pytest.mark.core(keep=2)
@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize("settings", SETTINGS, ids=[" ".join(s) for s in SETTINGS])
def test_fit(tmp_path: Path, settings: dict[str, Any]) -> None:
    calls, losses = (Calls(), Calls()), (jobs.Losses(), jobs.Losses())
    ours = jobs.trainer(tmp_path, tp=2, devices=4, callbacks=[calls[0], losses[0]], **settings)
    ours.fit(jobs.automatic(), jobs.loader(2), jobs.loader(2))
    plain = jobs.plain_trainer(tmp_path, callbacks=[calls[1], losses[1]], **settings)
    plain.fit(jobs.Plain(), jobs.whole_loader(4), jobs.loader(4))
    assert calls[0].calls == calls[1].calls
    assert {name for name, *_ in calls[0].calls} > {"setup", "on_fit_start", "on_before_optimizer_step", "on_train_batch_end", "teardown"}
    jobs.close(losses[0].losses, losses[1].losses)
    assert set(ours.callback_metrics) == set(plain.callback_metrics)
    jobs.close([ours.callback_metrics[k] for k in plain.callback_metrics], list(plain.callback_metrics.values()))


def test_overfitting(tmp_path: Path) -> None:
    """The same unshuffled batches over and over."""
    found, _ = jobs.fit(tmp_path, model=jobs.automatic(), tp=2, devices=4, overfit_batches=2, max_epochs=3)
    wanted, _ = jobs.plain_fit(tmp_path, data=jobs.loader(4), overfit_batches=2, max_epochs=3)
    assert len(found) == 6
    jobs.close(found, wanted)


@pytest.mark.thorough(keep=5)
@pytest.mark.parametrize("what", ["validate", "test", "predict"])
@pytest.mark.parametrize("limit", [1.0, 0.5, 3], ids=str)
def test_evaluation(tmp_path: Path, what: str, limit: Any) -> None:
    limits = {f"limit_{'val' if what == 'validate' else what}_batches": limit}
    calls = Calls(), Calls()
    found = getattr(jobs.trainer(tmp_path, tp=2, devices=4, callbacks=[calls[0]], **limits), what)(jobs.automatic(), jobs.loader(2))
    wanted = getattr(jobs.plain_trainer(tmp_path, callbacks=[calls[1]], **limits), what)(jobs.Plain(), jobs.loader(4))
    assert calls[0].calls == calls[1].calls
    if what == "predict":  # rank 0's rows
        jobs.close(torch.cat(found), torch.cat(wanted)[::2])
    else:
        jobs.close(found[0]["val_loss"], wanted[0]["val_loss"])


def test_the_sanity_check_changes_nothing(tmp_path: Path) -> None:
    """Nor does validation: dropout draws the same random numbers without them."""
    found = []
    for val, sanity in ((None, 0), (jobs.loader(2), 2)):
        model = jobs.module(tp=2, dropout=0.5)
        losses, _ = jobs.fit(tmp_path, model=model, tp=2, devices=4, val=val, num_sanity_val_steps=sanity, val_check_interval=4)
        found.append(losses)
    assert found[0] == found[1] and len(found[0]) == 12


# -- ends --------------------------------------------------------------------------------------------


def test_steps_epochs_and_time(tmp_path: Path) -> None:
    model = jobs.automatic()
    assert len(jobs.fit(tmp_path, model=model, tp=2, devices=4, max_steps=5)[0]) == 5
    assert len(jobs.fit(tmp_path, model=model, tp=2, devices=4, max_epochs=0)[0]) == 0
    losses, trainer = jobs.fit(tmp_path, model=model, tp=2, devices=4, max_epochs=-1, max_time={"seconds": 0.3})
    assert 0 < len(losses) == trainer.global_step


@pytest.mark.parametrize(
    "options",
    [
        {"monitor": "val_loss", "mode": "max", "patience": 1},
        {"monitor": "loss", "stopping_threshold": 4.0},
        {"monitor": "val_loss", "divergence_threshold": 0.1},
    ],
    ids=lambda options: " ".join(options),
)
def test_early_stopping(tmp_path: Path, options: dict[str, Any]) -> None:
    stops = EarlyStopping(**options), EarlyStopping(**options)
    found, ours = jobs.fit(tmp_path, model=jobs.automatic(), tp=2, devices=4, callbacks=(stops[0],), max_epochs=5, val=jobs.loader(2))
    plain = jobs.plain_trainer(tmp_path, callbacks=[stops[1]], max_epochs=5)
    plain.fit(jobs.Plain(), jobs.whole_loader(), jobs.loader(4))
    assert 0 < len(found) == plain.global_step < 60
    assert stops[0].stopped_epoch == stops[1].stopped_epoch and stops[0].wait_count == stops[1].wait_count
    assert ours.current_epoch == plain.current_epoch


def test_hooks_that_end_training(tmp_path: Path) -> None:
    class Enough(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            trainer.should_stop = trainer.global_step == 5

    class ShortEpochs(jobs.Automatic):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 4 else None

    assert len(jobs.fit(tmp_path, model=jobs.automatic(), tp=2, devices=4, callbacks=(Enough(),))[0]) == 5
    assert len(jobs.fit(tmp_path, model=jobs.automatic(ShortEpochs), tp=2, devices=4, max_epochs=2)[0]) == 8


# -- modules -----------------------------------------------------------------------------------------


def test_a_plain_module(tmp_path: Path) -> None:
    """A LightningModule that knows nothing of NxD trains with data parallelism."""
    found, _ = jobs.fit(tmp_path, model=jobs.Plain(), devices=4)
    wanted, _ = jobs.plain_fit(tmp_path, batch=8)
    jobs.close(found, wanted)


def test_configure_model(tmp_path: Path) -> None:
    weights = jobs.first_weights()

    class Late(jobs.Automatic):
        def setup(self, stage: str | None = None, include_buffers: bool = False) -> None:
            """Nothing yet."""

        def configure_model(self) -> None:
            if self.model is None:
                self.model = initialize_parallel_model(self.nxd_config, jobs.Model)
                jobs.load_full(self, weights, strict=True)

    class LatePlain(jobs.Plain):
        def __init__(self) -> None:
            LightningModule.__init__(self)
            self.model: Any = None
            self.optimizer = None

        def configure_model(self) -> None:
            if self.model is None:
                self.model = jobs.Model(parallel=False)
                self.model.load_state_dict(weights)

    found, _ = jobs.fit(tmp_path, model=jobs.automatic(Late), tp=2, devices=4)
    jobs.close(found, jobs.plain_fit(tmp_path)[0])
    found, _ = jobs.fit(tmp_path, model=LatePlain(), devices=2)
    jobs.close(found, jobs.plain_fit(tmp_path)[0])


def test_one_module_goes_through_everything(tmp_path: Path) -> None:
    """fit, validate, test, predict and fit again, with one Trainer or several."""
    model, made = jobs.automatic(), jobs.trainer(tmp_path, tp=2, devices=4)
    made.fit(model, jobs.loader(2), jobs.loader(2))
    after = float(made.callback_metrics["val_loss"])
    other = jobs.trainer(tmp_path, tp=2, devices=4)
    jobs.close(made.validate(model, jobs.loader(2), verbose=False)[0]["val_loss"], after)
    jobs.close(other.test(model, jobs.loader(2), verbose=False)[0]["val_loss"], after)
    assert len(other.predict(model, jobs.loader(2))) == 12
    other.fit(model, jobs.loader(2), jobs.loader(2))
    assert float(other.callback_metrics["val_loss"]) < after and other.global_step == 12


def test_half_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`precision="bf16-true"` sets XLA_USE_BF16 as Lightning does, and takes it back."""
    monkeypatch.delenv("XLA_USE_BF16", raising=False)
    monkeypatch.setattr(device_formats, "_warned", set())  # it is said once
    seen = []

    class Look(Callback):
        def on_validation_start(self, *args: Any) -> None:
            seen.append(os.environ.get("XLA_USE_BF16"))

    def loss(**options: Any) -> float:
        return jobs.trainer(tmp_path, tp=2, devices=4, **options).validate(jobs.automatic(), jobs.loader(2), verbose=False)[0]["val_loss"]

    with pytest.warns(FutureWarning, match="XLA_USE_BF16 is deprecated"):
        rounded = loss(precision="bf16-true", callbacks=[Look()])
    assert seen == ["1"] and "XLA_USE_BF16" not in os.environ
    assert 0 < abs(rounded - loss()) < 0.1
