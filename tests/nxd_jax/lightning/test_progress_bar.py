"""`NeuronTQDMProgressBar`: what it shows, and the arithmetic behind it."""

from __future__ import annotations

import re
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import TQDMProgressBar

from nxd_jax.lightning import _pace, progress_bar
from nxd_jax.lightning._pace import Amount, Pace, amount_of
from nxd_jax.lightning.progress_bar import NeuronTQDMProgressBar
from tests.nxd_jax.lightning import plain

IDS = torch.zeros(2, 8, dtype=torch.int64)
TOKENS = Amount(6, "tokens")
IMAGES = torch.zeros(4, 3, 2, 2)


@pytest.mark.parametrize(
    ("batch", "amount"),
    [
        ({"labels": IDS[:, :3], "input_ids": IDS}, Amount(16, "tokens")),
        (UserDict({"input_ids": IDS}), Amount(16, "tokens")),
        ({"input_ids": torch.zeros(2, 3, 4, dtype=torch.int64)}, Amount(24, "tokens")),
        ([torch.zeros(2, 8), IDS.int(), IDS[:, :3]], Amount(16, "tokens")),
        ((IMAGES, torch.zeros(4, dtype=torch.int64)), Amount(4, "samples")),
        ({"mask": torch.ones(3, 8, dtype=torch.bool)}, Amount(3, "samples")),
        ([torch.tensor(1.0), {"x": [IMAGES]}], Amount(4, "samples")),
        (IMAGES, Amount(4, "samples")),
        (torch.tensor(1.0), None),
        (["text", 3, None], None),
    ],
)
def test_what_a_batch_holds(batch: Any, amount: Amount | None) -> None:
    assert amount_of(batch) == amount


def test_a_batch_on_xla_is_not_read() -> None:
    ids = IDS.to("xla") + 1
    assert amount_of({"input_ids": ids}) == Amount(16, "tokens")
    assert ids._storage.array is None  # nothing has run yet


def paced(times: list[tuple[float, float]], amount: Amount | None = TOKENS, over: int = 10) -> Pace:
    """After batches that start and end at these seconds."""
    pace = Pace(over)
    for start, end in times:
        pace.batch_starts(start)
        pace.batch_ends(end, amount)
    return pace


def test_the_first_batch_does_not_count() -> None:
    assert Pace().seconds() is None and Pace().rate() is None
    assert paced([(0, 60)]).seconds() is None
    assert paced([(0, 60)]).rate() is None
    pace = paced([(0, 60), (60.5, 62), (62, 63)])
    assert (pace.seconds(), pace.rate()) == (1.5, (4.0, "tokens"))  # with the half second of reading data


def test_the_average_moves() -> None:
    assert paced([(0, 60), (60, 70), (70, 71), (71, 72)], over=2).seconds() == 1.0


def test_interruptions_do_not_count() -> None:
    pace = paced([(0, 60), (60, 61)])
    pace.pause()
    pace.batch_starts(500)
    pace.batch_ends(501, TOKENS)
    assert pace.seconds() == 1.0


def test_batches_that_cannot_be_counted() -> None:
    assert paced([(0, 60), (60, 61)], None).rate() is None
    assert paced([(0, 60), (60, 60)]).rate() is None  # a clock that stands still
    pace = paced([(0, 60), (60, 61)])
    pace.batch_ends(63, Amount(2, "samples"))
    assert (pace.seconds(), pace.rate()) == (1.5, (1.0, "samples"))


def test_in_words() -> None:
    assert _pace.described(Pace(), 4) == {}
    assert _pace.described(paced([(0, 60), (60, 60.125)]), 4) == {"step_time": "0.125s", "tokens/s": "192"}
    assert _pace.described(paced([(0, 60), (60, 61)], None), 4) == {"step_time": "1.000s"}


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (0.1234, "0.123"),
        (12.34, "12.3"),
        (99.96, "100"),
        (999.4, "999"),
        (999.6, "1k"),
        (12345, "12.3k"),
        (1.234e6, "1.23M"),
        (5e12, "5000G"),
    ],
)
def test_three_digits(number: float, text: str) -> None:
    assert _pace._short(number) == text


class Says(Callback):
    """What the bar says when a batch starts and when it has ended."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.said.append(getattr(trainer.progress_bar_callback.train_progress_bar, "postfix", "") or "")

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.said.append(getattr(trainer.progress_bar_callback.train_progress_bar, "postfix", "") or "")


def train(folder: Path, bar: TQDMProgressBar, strategy: Any = None, **options: Any) -> list[str]:
    said = Says()
    plain.fit(folder, callbacks=[bar, said], strategy=strategy or plain.Ranks("cpu"), enable_progress_bar=True, **options)
    return said.said


def test_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "_PAUSE", 0.0)
    said = train(tmp_path, NeuronTQDMProgressBar())
    assert said[0] == "compiling"
    assert re.fullmatch(r"loss=\S+", said[1])  # the first batch says nothing about those that follow
    assert re.fullmatch(r"loss=\S+, step_time=\d+\.\d{3}s, samples/s=\S+", said[3])
    assert re.fullmatch(r"loss=\S+, step_time=\d+\.\d{3}s, samples/s=\S+", said[-1])


def test_the_rate_is_of_the_whole_job(tmp_path: Path) -> None:
    bar = NeuronTQDMProgressBar()
    trainer = plain.fit(tmp_path, callbacks=[bar], strategy=plain.Ranks("cpu"), enable_progress_bar=True)
    bar._pace = paced([(0, 60), (60, 61)], Amount(5, "samples"))
    assert bar.get_metrics(trainer, trainer.lightning_module)["samples/s"] == "20"


def test_compiling_goes_away_when_the_bar_is_seldom_renewed(tmp_path: Path) -> None:
    said = train(tmp_path, NeuronTQDMProgressBar(refresh_rate=50, leave=True), data=plain.batches(4))
    assert said[:3] == ["compiling", "", ""]


def test_another_strategy_has_lightnings_bar(tmp_path: Path) -> None:
    said = train(tmp_path, NeuronTQDMProgressBar(), strategy="auto")
    assert said[0] == "" and all(re.fullmatch(r"loss=\S+", text) for text in said[1:])


def test_what_was_logged_comes_first(tmp_path: Path) -> None:
    class Module(plain.Module):
        def on_train_batch_end(self, *args: Any) -> None:
            self.log("step_time", 7.0, prog_bar=True)

    bar = NeuronTQDMProgressBar()
    trainer = plain.fit(tmp_path, Module(), callbacks=[bar], strategy=plain.Ranks("cpu"), enable_progress_bar=True)
    assert bar.get_metrics(trainer, trainer.lightning_module)["step_time"] == 7.0


def test_validation_is_no_part_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress_bar, "time", SimpleNamespace(perf_counter=lambda: now))

    class Clocked(plain.Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            nonlocal now
            now += 1
            return super().training_step(batch, batch_idx)

        def val_dataloader(self) -> Any:
            return plain.batches(1)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            nonlocal now
            now += 100

    bar = NeuronTQDMProgressBar()
    plain.fit(
        tmp_path, Clocked(), callbacks=[bar], strategy=plain.Ranks("cpu"), enable_progress_bar=True, val_check_interval=1, max_epochs=2
    )
    assert now == 6 + 7 * 100
    assert (bar._pace.seconds(), bar._pace.rate()) == (1.0, (5.0, "samples"))


def test_other_processes_show_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Second(plain.Ranks):
        is_global_zero = False

    train(tmp_path, NeuronTQDMProgressBar(), Second("cpu"))
    assert "Epoch" not in capsys.readouterr().out
