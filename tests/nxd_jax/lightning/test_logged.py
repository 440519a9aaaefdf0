"""`self.log`, metrics of torchmetrics and what goes between ranks: values, and how many programs that costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm
import torchmetrics
from neuronx_distributed.lightning import NeuronTQDMProgressBar
from neuronx_distributed.parallel_layers import parallel_state
from pytorch_lightning import Callback
from pytorch_lightning.loggers import CSVLogger
from torch import nn

from tests.nxd_jax.lightning import jobs
from torch_bridge import metrics
from torch_bridge.recorder import sharded

pytestmark = jobs.MARKS


def fit(folder: Path, kind: Any, **options: Any) -> Any:
    return jobs.fit(folder, model=jobs.automatic(kind), tp=2, devices=4, **options)[1]


# -- values ------------------------------------------------------------------------------------------


def test_steps_epochs_and_reductions(tmp_path: Path) -> None:
    """Rank 0's values, or all ranks' with sync_dist; two steps of an epoch."""
    losses: list[list[float]] = []

    class Logging(jobs.Automatic):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            value = loss.detach()
            for how in ("mean", "sum", "min", "max"):
                self.log(how, value, reduce_fx=how, on_step=True, on_epoch=True)
                self.log(f"all_{how}", value, reduce_fx=how, on_step=True, on_epoch=True, sync_dist=True)
            self.log_dict({"number": 2.0, "index": batch_idx, "value": value}, prog_bar=True)
            xm.mark_step()
            losses.append([s.item() for s in sharded.shards(value)])
            return loss

    made = fit(tmp_path, Logging, max_steps=2, logger=CSVLogger(tmp_path))
    steps = torch.tensor(losses, dtype=torch.double)  # by step and rank; tp ranks agree
    wanted = {"number": 2.0, "index": 1.0, "value": steps[1, 0], "mean_step": steps[1, 0], "all_mean_step": steps[1].mean()}
    for how, of in (("mean", torch.mean), ("sum", torch.sum), ("min", torch.amin), ("max", torch.amax)):
        wanted[f"{how}_epoch"], wanted[f"all_{how}_step"] = of(steps[:, 0]), of(steps[1])
        wanted[f"all_{how}_epoch"] = of(of(steps, dim=0))
    found = made.logged_metrics
    jobs.close([found[name] for name in wanted], list(wanted.values()))
    assert set(made.progress_bar_metrics) == {"number", "index", "value"}
    assert "all_max_epoch" in (Path(made.logger.log_dir) / "metrics.csv").read_text()


def test_numbers_that_were_read_before(tmp_path: Path) -> None:
    """`loss.item()` and `loss.cpu()` are put together over ranks like the tensor that they come from."""

    class Reading(jobs.Automatic):
        def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
            loss = outputs["loss"]
            for name, value in (("tensor", loss), ("item", loss.item()), ("cpu", loss.cpu())):
                self.log(name, value, sync_dist=True)
                jobs.close(self.trainer.strategy.reduce(value), self.trainer.callback_metrics["loss"])
                jobs.close(self.trainer.strategy.reduce(value, reduce_op="max"), max(s.item() for s in sharded.shards(loss)))

    made = fit(tmp_path, Reading, max_steps=2)
    for name in ("tensor", "item", "cpu"):
        jobs.close(made.callback_metrics[name], made.callback_metrics["loss"])


def test_reductions_of_the_strategy(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Reducing(jobs.Automatic):
        def on_train_start(self) -> None:
            reduce = self.trainer.strategy.reduce
            seen["host"] = [reduce(3), reduce(3, reduce_op="sum"), reduce(torch.tensor([1, 2]), reduce_op="max")]
            rank = torch.zeros(2, device="xla") + self.global_rank
            seen["device"] = [reduce(rank), reduce(rank, reduce_op=torch.distributed.ReduceOp.SUM), reduce(rank, reduce_op="min")]
            pairs = parallel_state.get_tensor_model_parallel_group()
            seen["group"] = [sharded.shards(reduce(rank, group=g))[2] for g in (pairs, [[0, 1], [2, 3]])]
            with pytest.raises(ValueError, match="reduce_op must be one of mean, avg, sum, min, max, got 'median'"):
                reduce(rank, reduce_op="median")

    fit(tmp_path, Reducing, max_steps=1)
    assert [t.tolist() for t in seen["host"]] == [3.0, 12, [1, 2]]
    assert [t.tolist() for t in seen["device"]] == [[1.5, 1.5], [6.0, 6.0], [0.0, 0.0]]
    assert all(t.device.type == "xla" for t in seen["device"])
    assert [t.tolist() for t in seen["group"]] == [[2.5, 2.5]] * 2


def test_between_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: dict[str, Any] = {}

    class Gathering(jobs.Automatic):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            seen["each"] = [s.item() for s in sharded.shards(loss)]
            seen["losses"] = self.all_gather([loss, loss.item(), loss.detach().cpu()])
            seen["rows"], seen["ranks"] = self.all_gather({"x": batch[0]})["x"], self.all_gather(self.global_rank)
            pair = parallel_state.get_data_parallel_group()
            seen["pairs"] = [s.tolist() for s in sharded.shards(self.all_gather(self.global_rank, group=pair))]
            self.print("step", batch_idx)
            return self.all_gather(loss, group=pair, sync_grads=True).mean()

        def on_after_backward(self) -> None:
            seen["gradient"] = self.model.head.bias.grad

    fit(tmp_path, Gathering, max_steps=1)
    assert seen["gradient"].item() != 0
    for found in seen["losses"]:
        jobs.close(found, seen["each"])
    assert seen["rows"].shape == (8, jobs.WIDTH) and seen["ranks"].tolist() == [0, 1, 2, 3]
    assert seen["pairs"] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert capsys.readouterr().out == "step 0\n"


# -- torchmetrics ------------------------------------------------------------------------------------


class Metrics(jobs.Automatic):
    """Metrics as attributes, logged as such."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.train_error, self.val_error = torchmetrics.MeanSquaredError(), torchmetrics.MeanSquaredError()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.train_error(self.model(batch[0]), batch[1])
        self.mean.update(loss.detach())
        self.log("train_error", self.train_error, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.val_error(self.model(batch[0]), batch[1])
        self.log("val_error", self.val_error)


def test_torchmetrics(tmp_path: Path) -> None:
    """Over all ranks at an epoch's end, and empty again for the next."""
    losses = jobs.Losses()
    made = fit(tmp_path, Metrics, val=jobs.loader(2), max_epochs=2, callbacks=(losses,))
    epoch = sum(losses.losses[12:]) / 12
    jobs.close([made.callback_metrics[name] for name in ("train_error_epoch", "mean")], [epoch, epoch])
    jobs.close(made.callback_metrics["val_error"], made.callback_metrics["val_loss"])


# -- programs ----------------------------------------------------------------------------------------


class Silent(jobs.Module):
    """Logs nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log_some(loss.detach())
        return loss

    def log_some(self, loss: torch.Tensor) -> None:
        """Nothing."""

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


class Local(Silent):
    """Logs tensors of the device, for the bar, for each step, and for both step and epoch."""

    def log_some(self, loss: torch.Tensor) -> None:
        self.log("a", loss, prog_bar=True)
        self.log("b", self.loss.float(), prog_bar=True, on_step=True)
        self.log("c", loss * 2, on_step=True, on_epoch=True)


class Global(Silent):
    """The same over all ranks."""

    def log_some(self, loss: torch.Tensor) -> None:
        self.log("a", loss, prog_bar=True, sync_dist=True)
        self.log("b", nn.functional.relu(loss), prog_bar=True, on_step=True, on_epoch=True, sync_dist=True)
        self.log("c", loss * 2, on_step=True, sync_dist=True)


class Programs(Callback):
    """Counts programs between the starts of batches."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.counts.append(metrics.EXECUTE_TIME.count)

    def per_step(self) -> int:
        (found,) = {after - before for before, after in zip(self.counts[3:], self.counts[4:], strict=False)}
        return found


def programs(folder: Path, kind: Any, looks: bool) -> int:
    """In each of the later steps of a training. looks: with a progress bar and a logger that look at every step's values."""
    counting = Programs()
    options: dict[str, Any] = {"logger": CSVLogger(folder), "enable_progress_bar": True} if looks else {}
    callbacks = (counting, NeuronTQDMProgressBar()) if looks else (counting,)
    jobs.fit(folder, model=jobs.module(kind, tp=2), tp=2, devices=4, callbacks=callbacks, max_steps=8, **options)
    return counting.per_step()


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("kind", [Local, Global, jobs.Module])
@pytest.mark.parametrize("looks", [False, True])
def test_logging_costs_one_program(tmp_path: Path, kind: Any, looks: bool) -> None:
    """At most, whatever is logged and whoever looks."""
    assert programs(tmp_path, kind, looks) <= programs(tmp_path, Silent, False) + 1
