"""Lightning's own callbacks under our strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from neuronx_distributed.lightning import NeuronLTModule
from neuronx_distributed.trainer import initialize_parallel_optimizer
from pytorch_lightning import LightningModule, callbacks
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.tuner import Tuner
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from tests.nxd_jax.lightning import jobs

pytestmark = jobs.MARKS


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def both(folder: Path, kind: Any, **options: Any) -> Any:
    """Fit with a callback each, made by `kind()`: ours, the plain Trainer's, and their callbacks."""
    made = kind(), kind()
    _, ours = jobs.fit(folder, model=jobs.automatic(), tp=2, devices=4, callbacks=(made[0],), logger=CSVLogger(folder), **options)
    _, plain = jobs.plain_fit(folder, callbacks=(made[1],), logger=CSVLogger(folder), **options)
    return ours, plain, *made


def test_learning_rates(tmp_path: Path) -> None:
    _, _, found, wanted = both(tmp_path, lambda: callbacks.LearningRateMonitor("step", log_momentum=True), max_steps=5)
    assert {name.replace("NxDOptimizer", "AdamW"): rates for name, rates in found.lrs.items()} == wanted.lrs and wanted.lrs


def test_accumulation_by_epoch(tmp_path: Path) -> None:
    kind = lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 3})  # noqa: E731
    ours, plain, *_ = both(tmp_path, kind, max_epochs=2)
    assert ours.global_step == plain.global_step == 16
    jobs.close(ours.callback_metrics["loss"], plain.callback_metrics["loss"])


def test_timer(tmp_path: Path) -> None:
    timer = callbacks.Timer(duration={"seconds": 0.2}, interval="step")
    _, made = jobs.fit(tmp_path, model=jobs.automatic(), tp=2, devices=4, callbacks=(timer,), max_epochs=-1)
    assert made.global_step > 0 and timer.time_elapsed("train") >= 0.2


@pytest.mark.filterwarnings("ignore:FLOPs not found for TPU 'NeuronCore'")
def test_statistics(tmp_path: Path) -> None:
    chosen = [
        callbacks.DeviceStatsMonitor(True),
        callbacks.ThroughputMonitor(lambda batch: len(batch[0]), window_size=2),
        callbacks.ModelSummary(2),
    ]
    logger = CSVLogger(tmp_path)
    options: dict[str, Any] = {"logger": logger, "callbacks": chosen, "max_steps": 4, "enable_model_summary": True}
    model = jobs.automatic()
    model.flops_per_batch = 100
    jobs.trainer(tmp_path, tp=2, devices=4, **options).fit(model, jobs.loader())
    logged = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "peak memory (MB)" in logged and "samples_per_sec" in logged


def test_learning_rate_finder(tmp_path: Path) -> None:
    """It saves and restores the module on the way."""

    class Finding(jobs.Automatic):
        lr = 0.1

    made, model = jobs.trainer(tmp_path, tp=2, devices=4), jobs.automatic(Finding)
    found = Tuner(made).lr_find(model, jobs.loader(2), num_training=6, min_lr=1e-4, max_lr=1.0, update_attr=False)
    assert len(found.results["loss"]) >= 6 and not list(tmp_path.glob(".lr_find*"))
    made.fit(model, jobs.loader(2))
    jobs.close(made.callback_metrics["loss"], jobs.plain_fit(tmp_path)[1].callback_metrics["loss"])


def test_batch_size_finder(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="not supported with distributed strategies"):
        jobs.fit(tmp_path, model=jobs.automatic(), tp=2, devices=4, callbacks=(callbacks.BatchSizeFinder(),))


# -- layers that are frozen at first -----------------------------------------------------------------


class Thaw(callbacks.BaseFinetuning):
    """Some layers learn from the second epoch on, more slowly."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(self._layers(pl_module))

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(self._layers(pl_module), optimizer, lr=0.003)

    def _layers(self, module: Any) -> list[Any]:
        found = dict(module.model.named_modules())
        return [next(m for name, m in found.items() if name.endswith(own)) for own in ("up", "norm")]


def of_those_that_learn(parameters: Any) -> torch.optim.Optimizer:
    return adam([p for p in parameters if p.requires_grad])


class Thawing(jobs.Automatic):
    def configure_optimizers(self) -> Any:
        learning = [p for p in self.parameters() if p.requires_grad]
        return initialize_parallel_optimizer(self.nxd_config, torch.optim.AdamW, learning, lr=0.01)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("zero1", [False, True])
def test_finetuning(tmp_path: Path, zero1: bool) -> None:
    """The model is there when layers are frozen; a training that is resumed has the groups that were added."""

    def ours(epochs: int, *more: Any, ckpt_path: Any = None) -> list[float]:
        options: dict[str, Any] = {"tp": 2, "zero1": zero1, "devices": 4, "max_epochs": epochs, "limit_train_batches": 3}
        return jobs.fit(tmp_path, model=jobs.automatic(Thawing, zero1=zero1), callbacks=(Thaw(), *more), ckpt_path=ckpt_path, **options)[0]

    def plain(*more: Any, ckpt_path: Any = None) -> list[float]:
        losses = jobs.Losses()
        made = jobs.plain_trainer(tmp_path, callbacks=[losses, Thaw(), *more], max_epochs=3, limit_train_batches=3)
        made.fit(jobs.Plain(of_those_that_learn), jobs.whole_loader(4), ckpt_path=ckpt_path)
        return losses.losses

    keep = [callbacks.ModelCheckpoint(tmp_path / name, save_top_k=-1, filename="{epoch}") for name in ("plain", "ours")]
    jobs.close(ours(3, keep[1]), plain(keep[0]))
    jobs.close(ours(3, ckpt_path=tmp_path / "ours" / "epoch=1.ckpt"), plain(ckpt_path=tmp_path / "plain" / "epoch=1.ckpt"))


# -- averages of weights -----------------------------------------------------------------------------

AVERAGING: list[Any] = [lambda: callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)]
if hasattr(callbacks, "EMAWeightAveraging"):  # Lightning 2.6
    AVERAGING += [callbacks.WeightAveraging, lambda: callbacks.EMAWeightAveraging(decay=0.9)]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("kind", AVERAGING)
def test_averages(tmp_path: Path, kind: Any) -> None:
    found = []
    for make, data, options in ((jobs.trainer, jobs.loader(2), {"devices": 2}), (jobs.plain_trainer, jobs.whole_loader(4), {})):
        model, made = jobs.Plain(adam), make(tmp_path, callbacks=[kind()], max_epochs=3, **options)
        made.fit(model, data, jobs.loader(4 if options else 8))
        during = made.callback_metrics["val_loss"].item()
        found.append([during, made.validate(model, jobs.loader(4), verbose=False)[0]["val_loss"]])
    jobs.close(found[0], found[1])
    assert found[0][0] != found[0][1] or kind is not AVERAGING[0]


@pytest.mark.parametrize("kind", AVERAGING)
def test_averages_of_what_is_made_later(tmp_path: Path, kind: Any) -> None:
    """They would copy a module without a model, and average nothing."""
    with pytest.raises(MisconfigurationException) as raised:
        jobs.fit(tmp_path, model=jobs.automatic(tp=1), devices=2, callbacks=(kind(),))
    assert "copies the module before Automatic.setup makes its model, and would average nothing" in str(raised.value)
    assert "average.lerp_(parameter.detach(), 0.01)" in str(raised.value)


def test_averages_of_parts(tmp_path: Path) -> None:
    """On the CPU there would be rank 0's parts only."""
    model: NeuronLTModule | LightningModule = jobs.automatic()
    jobs.trainer(tmp_path, tp=2, devices=4).validate(model, jobs.loader(8), verbose=False)
    with pytest.raises(MisconfigurationException, match="keeps whole models on the CPU .* tensor parallel ranks hold parts of this one"):
        jobs.fit(tmp_path, model=model, tp=2, devices=4, callbacks=(AVERAGING[0](),))
