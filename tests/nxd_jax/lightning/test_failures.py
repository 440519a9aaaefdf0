"""Ctrl-C and errors: they reach the script, no thread stays behind, and the process goes on with another Trainer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, Trainer
from torch.utils.data import DataLoader, Dataset

from tests.nxd_jax.lightning import jobs

pytestmark = jobs.MARKS


@pytest.fixture(autouse=True)
def same_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


class Failing(Callback):
    """Raises something in a hook of the 4th step, with the loaders still reading ahead."""

    def __init__(self, hook: str, error: BaseException | None):
        self.error, self.seen = error, list[BaseException]()
        setattr(self, hook, self.fail)

    def fail(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            if self.error is None:
                os.kill(os.getpid(), signal.SIGINT)
            else:
                raise self.error

    def on_exception(self, trainer: Trainer, module: Any, error: BaseException) -> None:
        self.seen.append(error)


def check_usable(folder: Path, model: Any = None) -> None:
    """No thread of a loader is left (also as long as the error, with what its frames hold, is alive), and another training has the numbers it should."""
    for thread in threading.enumerate():
        if thread.name.startswith("xla-loader"):
            thread.join(5)
            assert not thread.is_alive(), thread.name
    found, trainer = jobs.fit(folder, model=model or jobs.automatic(), tp=2, devices=4, max_steps=3)
    if model is None:
        jobs.close(found, jobs.plain_fit(folder, max_steps=3)[0])
    assert trainer.state.finished


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_zero_grad", "on_train_batch_end", "on_validation_batch_start"])
@pytest.mark.parametrize("error", [None, ValueError("in a hook")], ids=["ctrl-c", "error"])
def test_in_a_hook(tmp_path: Path, hook: str, error: Exception | None) -> None:
    failing, model = Failing(hook, error), jobs.automatic()
    made = jobs.trainer(tmp_path, tp=2, devices=4, callbacks=[failing], val_check_interval=3)
    with pytest.raises(
        (SystemExit, KeyboardInterrupt) if error is None else ValueError
    ) as raised:  # Lightning before 2.6 returns from Ctrl-C
        made.fit(model, jobs.loader(2), jobs.loader(2))
    late = error is None and made.global_step == 4  # Ctrl-C waits until nothing is half done
    assert made.interrupted and (made.global_step == 3 or late)
    assert [type(e) for e in failing.seen] == [KeyboardInterrupt if error is None else ValueError]
    check_usable(tmp_path)
    check_usable(tmp_path, model.train())  # Lightning leaves it as validation had it
    del raised


def test_ctrl_c_has_an_exit_code(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as raised:
        jobs.fit(tmp_path, model=jobs.automatic(), tp=2, devices=4, callbacks=(Failing("on_train_batch_end", KeyboardInterrupt()),))
    assert raised.value.code == 1


@pytest.mark.parametrize("manual", [True, False])
def test_in_training_step(tmp_path: Path, manual: bool) -> None:
    """With gradients half made: nothing of them is left for the next."""

    class Broken(jobs.Module if manual else jobs.Automatic):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
            if batch_idx == 3:
                (loss * 1e6).backward()
                raise RuntimeError("in training_step")
            return super().training_step(batch, batch_idx)

    model = jobs.module(Broken, tp=2, manual_opt=manual)
    with pytest.raises(RuntimeError, match="^in training_step$") as raised:
        jobs.fit(tmp_path, model=model, tp=2, devices=4)
    assert "test_failures.py" in str(raised.traceback[-1].path)
    check_usable(tmp_path)


def test_in_a_data_set(tmp_path: Path) -> None:
    """It is raised at the batch that it belongs to, with its own traceback."""

    class Disk(Dataset[Any]):
        def __len__(self) -> int:
            return jobs.ROWS

        def __getitem__(self, index: int) -> Any:
            if index == 17:
                raise OSError("disk")
            return jobs.rows()[index]

    losses = jobs.Losses()
    made = jobs.trainer(tmp_path, tp=2, devices=4, callbacks=[losses], use_distributed_sampler=False)
    with pytest.raises(OSError, match="disk") as raised:
        made.fit(jobs.automatic(), DataLoader(Disk(), 2))
    assert len(losses.losses) == 8 and raised.traceback[-1].name == "__getitem__"
    check_usable(tmp_path)


def test_in_a_loss_that_is_compiled_late(tmp_path: Path) -> None:
    """What only shows when a program is made is raised too."""

    class Wrong(jobs.Automatic):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.nn.functional.mse_loss(self.model(batch[0]), batch[1].view(-1, 3))

    with pytest.raises(RuntimeError):
        jobs.fit(tmp_path, model=jobs.automatic(Wrong), tp=2, devices=4)
    check_usable(tmp_path)
