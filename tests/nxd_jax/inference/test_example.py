"""The example runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_prompts_are_served(tmp_path: Path) -> None:
    """Five prompts on two lines: the last one ends last, and the file of the model gives the same."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "examples" / "inference" / "generate.py"), "--tp", "2", "--new", "5"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(" tokens")[0] for line in lines[:5]] == [f"prompt {k}: 5" for k in range(5)]
    assert lines[-1] == "the saved model answers the same: True"
