"""The examples run, on `xla` and in plain PyTorch, and say the same; a second run of a training script compiles nothing from scratch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
COUNTED = [sys.executable, str(ROOT / "tests" / "counted.py")]
DEVICES = {"xla": {}, "torch": {"DISABLE_XLA": "1"}}
CHAR_LM = ["--steps", "12", "--batch", "4", "--seq", "32", "--hidden", "64", "--layers", "1", "--eval-every", "6", "--out", "out"]
LLAMA = ["--tp", "2", "--steps", "3", "--batch", "1", "--seq", "16", "--hidden", "32", "--layers", "1", "--heads", "4", "--kv-heads", "4"]


def run(command: list[str], folder: Path, **environment: str) -> str:
    """The standard output of a command in a folder of its own, which is made."""
    folder.mkdir(exist_ok=True)
    clean = {key: value for key, value in os.environ.items() if key not in ("DISABLE_XLA", "NEURON_CC_FLAGS")} | environment
    clean["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


def counters(output: str) -> tuple[int, int]:
    """Programs found in the persistent cache and compiled, from the line that `counted.py` adds."""
    found = json.loads(output.splitlines()[-1])
    return found["PersistentCacheHit"], found["PersistentCacheMiss"]


def check_char_lm(device: str, output: str, folder: Path) -> dict[str, Any]:
    """What the example left behind; returns its summary."""
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["device"] == {"xla": "xla:0", "torch": "cpu"}[device]
    assert {"xla": "torch device xla:0 runs on JAX", "torch": "plain PyTorch on cpu"}[device] in output.splitlines()[0]
    assert summary["validation_loss"] < 5.45  # a uniform guess is log(256) = 5.545
    assert summary["reloaded_loss_difference"] < 1e-4
    assert (folder / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len((folder / "out" / "sample.txt").read_text()) > 0
    return summary


def test_char_lm_learns_the_same_on_xla_and_compiles_once(tmp_path: Path) -> None:
    """In plain PyTorch, on xla, and on xla in a second process with the cache of the first."""
    script = str(EXAMPLES / "char_lm.py")
    plain = check_char_lm("torch", run([sys.executable, script, *CHAR_LM], tmp_path / "torch", DISABLE_XLA="1"), tmp_path / "torch")

    def on_xla(name: str) -> tuple[float, str, tuple[int, int]]:
        folder = tmp_path / name
        output = run([*COUNTED, script, *CHAR_LM], folder, NEURON_COMPILE_CACHE_URL=str(tmp_path / "cache"))
        summary = check_char_lm("xla", output, folder)
        return summary["validation_loss"], (folder / "out" / "sample.txt").read_text(), counters(output)

    loss, sample, (hits, compiled) = on_xla("first")
    assert loss == pytest.approx(plain["validation_loss"], abs=1e-3)
    assert compiled > 3 and hits == 0
    assert on_xla("second") == (loss, sample, (compiled, 0))


@pytest.mark.thorough
def test_a_second_run_under_nxd_run_compiles_nothing(tmp_path: Path) -> None:
    """The NxD Llama on four emulated ranks: the same losses, from the programs of the first run."""

    def train(name: str) -> tuple[list[float], tuple[int, int]]:
        command = [*COUNTED, "-m", "nxd_jax.run", "--nproc_per_node", "4", str(EXAMPLES / "llama" / "train.py"), *LLAMA, "--out", "out"]
        output = run(command, tmp_path / name, NEURON_COMPILE_CACHE_URL=str(tmp_path / "cache"))
        return json.loads((tmp_path / name / "out" / "summary.json").read_text())["losses"], counters(output)

    losses, (hits, compiled) = train("first")
    assert compiled > 0 and hits == 0
    assert train("second") == (losses, (compiled, 0))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("device", DEVICES)
def test_mlp_digits(device: str, tmp_path: Path) -> None:
    output = run([sys.executable, str(EXAMPLES / "mlp_digits.py"), "--epochs", "10"], tmp_path, **DEVICES[device])
    accuracy = re.search(r"Test accuracy: ([\d.]+) %", output)
    assert accuracy is not None
    assert float(accuracy.group(1)) >= 95
