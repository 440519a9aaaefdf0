"""The examples run, on `xla` and in plain PyTorch, and say the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEVICES = {"xla": {}, "torch": {"DISABLE_XLA": "1"}}
TINY = ["--steps", "12", "--batch", "4", "--seq", "32", "--hidden", "64", "--layers", "2", "--eval-every", "6"]


def run_example(name: str, *arguments: str, device: str, folder: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "DISABLE_XLA"} | DEVICES[device]
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_char_lm(device: str, folder: Path) -> float:
    """Run the example, check what it left behind and return its validation loss."""
    folder.mkdir()
    output = run_example("char_lm.py", *TINY, "--out", "out", device=device, folder=folder)
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["device"] == {"xla": "xla:0", "torch": "cpu"}[device]
    assert {"xla": "torch device xla:0 runs on JAX", "torch": "plain PyTorch on cpu"}[device] in output.splitlines()[0]
    assert summary["validation_loss"] < 5.45  # a uniform guess is log(256) = 5.545
    assert summary["reloaded_loss_difference"] < 1e-4
    assert (folder / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len((folder / "out" / "sample.txt").read_text()) > 0
    return summary["validation_loss"]


def test_char_lm_learns_the_same_on_xla(tmp_path: Path):
    losses = {device: check_char_lm(device, tmp_path / device) for device in DEVICES}
    assert losses["xla"] == pytest.approx(losses["torch"], abs=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_mlp_digits(device: str, tmp_path: Path):
    output = run_example("mlp_digits.py", "--epochs", "10", device=device, folder=tmp_path)
    accuracy = re.search(r"Test accuracy: ([\d.]+) %", output)
    assert accuracy is not None
    assert float(accuracy.group(1)) >= 95
