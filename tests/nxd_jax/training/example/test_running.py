"""nxdt-train --example from end to end, on fewer ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from nxd_jax.training.example import curves, files, running

SMALLER = ("trainer.devices=4", "distributed_strategy.tensor_model_parallel_size=2", "trainer.max_steps=16", "model.num_layers=1")


@pytest.mark.slow
def test_it_trains_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    changes = [*SMALLER, "exp_manager.checkpoint_callback_params.every_n_train_steps=4", "data.micro_batch_size=2"]
    assert running.run_example(tmp_path / "out", changes) == 0
    said = capfd.readouterr().out
    found = re.search(r"its newest checkpoint is of step (\d+)", said)
    assert found and 8 <= int(found[1]) < 16
    where = files.Files(tmp_path / "out")
    values = curves.losses(where.experiments)
    assert list(values) == list(range(16))
    assert values[15] < values[0] - 0.5
    assert running.newest(where.experiments) == 16
    assert where.curve.is_file() and "step 0: " in said
    for words in ("train longer:  nxdt-train", "look at data:  nxdt-data show", "TensorBoard:", "checkpoints:"):
        assert words in said


def test_a_training_that_ends_by_itself(tmp_path: Path) -> None:
    """And one that is told to."""
    assert running._until([sys.executable, "-c", "raise SystemExit(4)"], lambda: False) == (4, False)
    ready = tmp_path / "ready"
    waits = f"import signal, time, pathlib; signal.signal(signal.SIGTERM, lambda *_: exit(0)); pathlib.Path({str(ready)!r}).touch(); time.sleep(60)"
    assert running._until([sys.executable, "-c", waits], ready.exists) == (0, True)
