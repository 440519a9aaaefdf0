"""A process that is killed at any moment of saving a pipeline, or a model with experts, leaves the last complete tag, which loads in another layout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("model", "kind", "kills"),
    [
        ("--pipeline", "nxd", "2 20 60 0.5s 110 1.5s 33 0"),
        ("--pipeline", "original", "1 24 70 0.5s 45 130 0"),
        ("--experts", "nxd", "2 40 75 0.7s 120 33 0"),
        ("--experts", "original", "1 24 90 0.5s 60 150 0"),
    ],
)
def test_successors_resume_from_the_newest_complete_tag(tmp_path: Path, model: str, kind: str, kills: str) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "NXD_JAX_CHECKPOINT_FORMAT": kind}
    command = [sys.executable, "-W", "ignore", "-m", "tests.nxd_jax.checkpoint.pipeline_kills", model, str(tmp_path / "c"), *kills.split()]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    resumed = done.stdout.rpartition("resumed from ")[2].split()
    steps = [int(text.rstrip("+")) for text in resumed]
    assert len(steps) == len(kills.split()) and steps == sorted(steps) and steps[-1] > 1, resumed
    assert sum(text.endswith("+") for text in resumed) > 2, resumed
