"""SIGTERM while a Trainer fits: Lightning's own handler is called, and the loop ends after the batch."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.utilities.exceptions import SIGTERMException

from tests.nxd_jax.lightning import jobs
from torch_bridge.mesh import world

pytestmark = jobs.MARKS


class Ending(Callback):
    """Sends SIGTERM to its own process in the middle of a batch."""

    def __init__(self) -> None:
        self.batches = 0
        self.sent = False
        self.errors: list[BaseException] = []

    def on_after_backward(self, *args: Any) -> None:
        if self.batches == 1:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def on_exception(self, trainer: Trainer, module: Any, error: BaseException) -> None:
        self.errors.append(error)


def test_the_loop_ends_after_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world.configure(world.World(2))
    before, ending = signal.getsignal(signal.SIGTERM), Ending()
    broadcasts, broadcast = [], dist.broadcast
    monkeypatch.setattr(dist, "broadcast", lambda *args, **options: (broadcasts.append(ending.sent), broadcast(*args, **options)))
    with pytest.raises(SIGTERMException):
        jobs.trainer(tmp_path, callbacks=[ending], max_epochs=9).fit(jobs.automatic(tp=1), jobs.loader())
    assert ending.batches == 2 and isinstance(ending.errors[0], SIGTERMException)
    assert dist.is_initialized() and True not in broadcasts  # Lightning's own handler would, in the middle of what is being recorded
    assert signal.getsignal(signal.SIGTERM) is before
