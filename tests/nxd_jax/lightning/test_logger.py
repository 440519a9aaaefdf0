"""`NeuronTensorBoardLogger`: which scalars TensorBoard gets, and at which steps."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nxd_jax.lightning.logger import NeuronTensorBoardLogger
from tests.nxd_jax.lightning import plain


def written(logger: NeuronTensorBoardLogger) -> dict[str, list[int]]:
    """The steps of each scalar in the logger's files."""
    logger.save()
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return {tag: [e.step for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


class PrintSteps(Callback):
    """Sets `print_step` before each batch and after it."""

    def __init__(self, after: Any):
        self.after = after

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        trainer.logger.print_step = -1

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        value = self.after(trainer, batch_idx)
        if value is not None:
            trainer.logger.print_step = value


def test_scalars_arrive_without_further_ado(tmp_path: Path) -> None:
    logger = NeuronTensorBoardLogger(tmp_path, name="run", version=3)
    plain.fit(tmp_path, logger=logger)
    assert logger.print_step == -1
    assert written(logger)["loss"] == [0, 1, 2]
    assert logger.log_dir == str(tmp_path / "run" / "version_3")


def test_the_guides_way(tmp_path: Path) -> None:
    """As the developer guide has it: nothing during a step, and then at `global_step`."""
    logger = NeuronTensorBoardLogger(save_dir=tmp_path)
    plain.fit(tmp_path, logger=logger, callbacks=[PrintSteps(lambda trainer, i: trainer.global_step)])
    assert written(logger)["loss"] == [1, 2, 3]
    assert logger.print_step == 3


def test_nothing_is_written_at_a_negative_step(tmp_path: Path) -> None:
    """As with gradient accumulation: batches after which `print_step` stays -1."""
    logger = NeuronTensorBoardLogger(tmp_path)
    data = plain.batches(4)
    plain.fit(tmp_path, data=data, logger=logger, callbacks=[PrintSteps(lambda trainer, i: 10 * i if i % 2 else None)])
    assert written(logger)["loss"] == [10, 30]
    logger.print_step = -5
    logger.log_metrics({"more": 1.0}, step=4)
    assert "more" not in written(logger)


def test_print_step_counts_for_every_scalar(tmp_path: Path) -> None:
    logger = NeuronTensorBoardLogger(tmp_path, prefix="train")
    logger.log_metrics({"a": 1.0}, step=7)
    logger.print_step = 0
    logger.log_metrics({"a": torch.tensor(2.0)}, step=8)
    assert written(logger) == {"train-a": [7, 0]} and logger.should_print()
    logger.print_step = -1
    assert not logger.should_print()


def test_hyperparameters_whatever_print_step_is(tmp_path: Path) -> None:
    logger = NeuronTensorBoardLogger(tmp_path)
    logger.print_step = -1
    logger.log_hyperparams({"lr": 0.1}, {"score": 2.0})
    assert logger.print_step == -1
    assert written(logger) == {"score": [0]}
    assert "lr: 0.1" in (Path(logger.log_dir) / "hparams.yaml").read_text()
    logger.log_metrics({"a": 1.0}, step=7)
    assert "a" not in written(logger)


def test_versions_count_up(tmp_path: Path) -> None:
    first, second = NeuronTensorBoardLogger(tmp_path), None
    first.log_metrics({"a": 1.0})
    second = NeuronTensorBoardLogger(tmp_path, log_rank0=True)
    assert (first.version, second.version, second.log_rank0) == (0, 1, True)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # how torch's own TensorBoard writer traces
def test_a_graph(tmp_path: Path) -> None:
    logger = NeuronTensorBoardLogger(tmp_path, log_graph=True)
    module = plain.Module()
    module.forward = module.model.forward
    logger.log_graph(module, torch.zeros(1, 3))
    logger.save()
    events = EventAccumulator(logger.log_dir)
    assert events.Reload().Tags()["graph"]


def test_only_the_process_of_rank_0_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = NeuronTensorBoardLogger(tmp_path)
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger.log_metrics({"a": 1.0}, step=1)
    logger.print_step = 2
    logger.log_metrics({"a": 1.0})
    logger.log_hyperparams({"lr": 0.1})
    logger.save()
    assert not list(tmp_path.iterdir())


def test_a_copy_keeps_print_step(tmp_path: Path) -> None:
    logger = NeuronTensorBoardLogger(tmp_path)
    logger.print_step = 4
    assert pickle.loads(pickle.dumps(logger)).print_step == 4


def test_what_is_no_step(tmp_path: Path) -> None:
    logger = NeuronTensorBoardLogger(tmp_path)
    with pytest.raises(TypeError, match=r"print_step must be a whole number, .* got 1\.5"):
        logger.print_step = 1.5
    with pytest.raises(
        TypeError, match=r"save_dir must be a folder, got True; pass log_rank0 by name: \(save_dir=\.\.\., log_rank0=True\)"
    ):
        NeuronTensorBoardLogger(True)
