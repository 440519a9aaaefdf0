"""Loaders of all kinds, and what `Trainer.predict` gives."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla.distributed.parallel_loader as pl
from pytorch_lightning import LightningDataModule
from pytorch_lightning.callbacks import BasePredictionWriter
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Subset

from tests.nxd_jax.lightning import jobs
from torch_bridge.recorder import sharded

pytestmark = jobs.MARKS


def fit(folder: Path, data: Any, kind: Any = jobs.Automatic, **options: Any) -> list[float]:
    return jobs.fit(folder, model=jobs.automatic(kind), tp=2, devices=4, data=data, **options)[0]


class Stream(IterableDataset[Any]):
    """All rows in order, for every rank."""

    def __iter__(self) -> Iterator[Any]:
        rows = jobs.rows()
        return (rows[k] for k in range(len(rows)))


# -- training ----------------------------------------------------------------------------------------


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("limits", [{}, {"limit_train_batches": 5}], ids=["whole", "limited"])
def test_streams(tmp_path: Path, limits: dict[str, Any]) -> None:
    options: dict[str, Any] = {"max_epochs": 2, **limits}
    found = fit(tmp_path, DataLoader(Stream(), 2), val=DataLoader(Stream(), 2), val_check_interval=2, limit_val_batches=3, **options)
    wanted, _ = jobs.plain_fit(tmp_path, data=DataLoader(Stream(), 2), **options)
    assert len(found) == (10 if limits else 48)
    jobs.close(found, wanted)


class Both:
    """Learns from a dict of batches, some of them None when their loader has ended."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = [part for part in batch.values() if part is not None]
        return super().training_step([torch.cat([part[k] for part in found]) for k in (0, 1)], batch_idx)  # type: ignore[misc]


class Ours(Both, jobs.Automatic):
    pass


class Theirs(Both, jobs.Plain):
    pass


@pytest.mark.parametrize(("mode", "count"), [("min_size", 5), ("max_size_cycle", 12), ("max_size", 12)])
def test_several_loaders(tmp_path: Path, mode: Any, count: int) -> None:
    few = Subset(jobs.rows(1), range(20))
    found = fit(tmp_path, CombinedLoader({"a": jobs.loader(2), "b": DataLoader(few, 2)}, mode), Ours)
    plain = {"a": jobs.whole_loader(4), "b": DataLoader(few, 4, sampler=DistributedSampler(few, 1, 0, seed=0))}
    wanted, _ = jobs.plain_fit(tmp_path, model=Theirs(), data=CombinedLoader(plain, mode))
    assert len(found) == count
    jobs.close(found, wanted)


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_a_step_that_takes_batches_itself(tmp_path: Path) -> None:
    class Taking(jobs.Automatic):
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, *_ = next(dataloader_iter)
            loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
            self.log("loss", loss, batch_size=2, sync_dist=True)
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            """Logs nothing more."""

    jobs.close(fit(tmp_path, jobs.loader(2), Taking), jobs.plain_fit(tmp_path)[0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # JAX warns of fork; workers do not use it
def test_worker_processes(tmp_path: Path) -> None:
    jobs.close(fit(tmp_path, jobs.loader(2, num_workers=1)), jobs.plain_fit(tmp_path)[0])


def test_loaders_that_are_left_alone(tmp_path: Path) -> None:
    """A sampler of one's own with `use_distributed_sampler=False`, any iterable, an MpDeviceLoader."""

    class Batches:
        def __iter__(self) -> Iterator[Any]:
            return iter(jobs.loader(4))

    wanted, _ = jobs.plain_fit(tmp_path, data=jobs.loader(4))
    for data in (jobs.loader(4), Batches(), pl.MpDeviceLoader(jobs.loader(4), "xla")):
        jobs.close(fit(tmp_path, data, use_distributed_sampler=False), wanted)


def test_a_sampler_of_ones_own(tmp_path: Path) -> None:
    """Ranks share out what it draws, each row once."""
    seen: list[Any] = []

    class Looking(jobs.Automatic):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append(torch.cat(sharded.shards(batch[0])[::2]))

    class Weighted(RandomSampler):
        """Not one that Lightning knows."""

    fit(tmp_path, jobs.loader(2, sampler=Weighted(jobs.rows())), Looking)
    rows = jobs.rows().tensors[0]
    assert sorted(torch.cat(seen).tolist()) == sorted(rows.tolist()) and torch.cat(seen).tolist() != rows.tolist()


def test_uneven_rows(tmp_path: Path) -> None:
    """Lightning's sampler repeats rows, so that ranks have as many."""
    rows, seen = Subset(jobs.rows(), range(45)), []

    class Looking(jobs.Automatic):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append(torch.cat(sharded.shards(batch[0])[::2]))

    assert len(fit(tmp_path, DataLoader(rows, 2), Looking)) == 12
    drawn = torch.cat(seen)
    assert len(drawn) == 46 and len(drawn.unique(dim=0)) == 45


# -- data modules ------------------------------------------------------------------------------------


class Data(LightningDataModule):
    """Every hook."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {TrainerFn(stage).value}")

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {TrainerFn(stage).value}")

    def train_dataloader(self) -> Any:
        return jobs.loader(2)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        assert device.type == "xla" and all(t.device.type == "xla" for t in batch)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] * 2, batch[1]


def test_data_module(tmp_path: Path) -> None:
    data, made, model = Data(), jobs.trainer(tmp_path, tp=2, devices=4), jobs.automatic()
    made.fit(model, datamodule=data)
    wanted, plain = jobs.plain_trainer(tmp_path), jobs.Plain()
    wanted.fit(plain, jobs.whole_loader(4), jobs.loader(4))
    after = made.validate(model, datamodule=data, verbose=False)[0]["val_loss"]
    assert made.test(model, datamodule=data, verbose=False)[0]["val_loss"] == after
    assert len(made.predict(model, datamodule=data)) == 12
    each = [["prepare_data", f"setup {stage}", f"teardown {stage}"] for stage in ("fit", "validate", "test", "predict")]
    assert data.calls == sum(each, [])  # noqa: RUF017
    assert abs(after - wanted.callback_metrics["val_loss"].item()) > 1e-3  # on_after_batch_transfer did something


def test_a_plain_trainer_prepares_data_after_ours(tmp_path: Path) -> None:
    """torch.distributed then has a group of ranks that this process alone hosts; nobody waits for others."""
    jobs.trainer(tmp_path, tp=2, devices=4, limit_train_batches=0).fit(jobs.automatic(), jobs.loader())
    data = Data()
    data.transfer_batch_to_device = lambda batch, *_: batch  # type: ignore[method-assign]
    jobs.plain_trainer(tmp_path, max_steps=1).fit(jobs.Plain(), datamodule=data)
    assert data.calls == ["prepare_data", "setup fit", "teardown fit"]


# -- predicting --------------------------------------------------------------------------------------


def plain_predictions(folder: Path, data: Any) -> torch.Tensor:
    return torch.cat(jobs.plain_trainer(folder).predict(jobs.Plain(), DataLoader(data, 8)))


@pytest.mark.parametrize("count", [48, 45, 3, 1])
def test_predictions(tmp_path: Path, count: int, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0's rows, each once, also if ranks do not get as many."""
    rows = Subset(jobs.rows(), range(count))
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        found = jobs.trainer(tmp_path, tp=2, devices=4).predict(jobs.automatic(), DataLoader(rows, 2))
    jobs.close(torch.cat(found), plain_predictions(tmp_path, rows)[::2])
    assert "each of 2 data-parallel ranks predicts its own rows, and what is returned is rank 0's" in caplog.text


@pytest.mark.parametrize("count", [16, 13])
def test_predictions_of_all_ranks(tmp_path: Path, count: int) -> None:
    """The first rows again at the end, where some rank would have fewer."""

    class Gathering(jobs.Automatic):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.all_gather(super().predict_step(batch, batch_idx)).view(2, 2, -1)[:, 0].T.flatten()

    rows = Subset(jobs.rows(), range(count))
    found = jobs.trainer(tmp_path, tp=2, devices=4).predict(jobs.automatic(Gathering), DataLoader(rows, 2))
    wanted = plain_predictions(tmp_path, rows).flatten()
    jobs.close(torch.cat(found), torch.cat([wanted, wanted[: count % 2]]))


@pytest.mark.parametrize("tp", [2, 4])
def test_prediction_writers(tmp_path: Path, tp: int) -> None:
    """They learn which rows rank 0 predicted; other loaders come after the first."""

    class Writer(BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__("batch_and_epoch")
            self.batches: list[Any] = []

        def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, idx: int, loader: int) -> None:
            self.batches.append((loader, indices))

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
            self.indices = indices

    class Indexed(jobs.Automatic):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return super().predict_step(batch, batch_idx)

    writer, few = Writer(), Subset(jobs.rows(1), range(3))
    made = jobs.trainer(tmp_path, tp=tp, devices=4, callbacks=[writer])
    made.predict(jobs.automatic(Indexed, tp), [jobs.loader(8), DataLoader(few, 2)], return_predictions=False)
    dp = 4 // tp
    rows = [list(range(k, min(k + 8 * dp, 48), dp)) for k in range(0, 48, 8 * dp)]
    end = [[0, 2]] if tp == 2 else [[0, 1], [2]]
    assert writer.indices == [rows, end]
    assert writer.batches == [(0, row) for row in rows] + [(1, row) for row in end]
