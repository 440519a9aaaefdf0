"""transformers' Trainer, unchanged: the losses of the same script on the CPU, checkpoints and resuming included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "tests" / "models" / "hf_trainer.py"


def _run(folder: Path, batch: int, *launcher: str, **environment: str) -> Any:
    """What the script found."""
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'aliases'}", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **environment}
    command = [sys.executable, *launcher, str(SCRIPT), str(folder), str(batch)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=400, cwd=folder.parent)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert done.returncode == 0 and lines, done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("FOUND "))


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = _run(tmp_path_factory.mktemp("cpu") / "out", 4, USE_TORCH_XLA="0")
    assert found["device"] == "cpu"
    return found


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("ranks", "replay"), [(2, "all"), (1, "all"), (1, "0")])
def test_losses_are_those_of_the_cpu(ranks: int, replay: str, on_the_cpu: Any, tmp_path: Path) -> None:
    """On one rank, and on two with half of each batch."""
    launcher = ["-m", "nxd_jax.run", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    found = _run(tmp_path / "out", 4 // ranks, *launcher, NXD_JAX_REPLAY=replay, JAX_PLATFORMS="cpu")
    assert found["device"] == "xla:0" and found["ranks"] == ranks and (found["played"] > 0) == (replay == "all")
    for run, expected in zip(found["runs"], on_the_cpu["runs"], strict=True):
        assert run["losses"] == pytest.approx(expected["losses"], rel=1e-3) and len(run["losses"]) == 12
        assert run["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-3)
    first, resumed = found["runs"]
    assert resumed["losses"] == pytest.approx(first["losses"], rel=1e-6) and abs(first["losses"][0] - first["losses"][-1]) > 1e-2
