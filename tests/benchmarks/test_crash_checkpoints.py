"""A few lives of `benchmarks/crash_checkpoints.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_few_kills() -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(ROOT / "benchmarks" / "crash_checkpoints.py"),
        "--count",
        "5",
        "--seconds",
        "0.6",
        "--rows",
        "64",
    ]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 processes killed, every successor resumed from the newest complete tag" in done.stdout
