"""SIGTERM for one of two processes: both end after the same step, with one checkpoint, and go on from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import quick
from tests.nxd_jax.training.utils import preempted

ROOT = Path(__file__).resolve().parents[4]


def launched(folder: Path, step: str) -> list[dict[str, Any]]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", preempted.__file__, str(folder), step]
    environment = {**os.environ, **quick.environment(), "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'aliases'}"}
    done = subprocess.run(launch, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"found_{rank}.json").read_text()) for rank in (0, 1)]


def test_both_end_and_go_on(tmp_path: Path) -> None:
    first, second = launched(tmp_path, "2")
    assert first == second and first["ended"] == "SIGTERM" and first["step"] == 3 and first["same"]
    assert first["kept"] == ["small--step=3-consumed_samples=24.0.ckpt"]
    again, other = launched(tmp_path, "never")
    assert again == other and again["ended"] == "by itself" and again["step"] == 6 and len(again["losses"]) == 3
    assert {p.name for p in (tmp_path / "small" / "run_0").iterdir()} >= {f"nemo_log_globalrank-{k}_localrank-{k}.txt" for k in (0, 1)}
