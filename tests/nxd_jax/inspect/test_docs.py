"""docs/tutorials/look_inside.md: its code runs as the script that the page has readers save, and its links lead somewhere."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

from tests.test_readme import ROOT, broken_links, script

PAGE = ROOT / "docs" / "tutorials" / "look_inside.md"


def test_the_code_runs(tmp_path: pathlib.Path) -> None:
    """In a process of its own: programs and runs are counted from the first one on, so nothing may have run before."""
    code = script(PAGE)
    assert code.count("print(") >= 7
    (tmp_path / "train.py").write_text(code)
    command = [sys.executable, "-W", "error", "-W", "ignore:Use torch_xla:DeprecationWarning", "train.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "aliases")])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert re.search(r"^the program at train\.py:\d+: \d+ ops, one rank, run 3 times$", said, flags=re.MULTILINE)
    assert "an input of 0.up (aten.addmm) was float32[32, 64], now float32[16, 64]" in said
    assert re.search(r"^Noted +6 +0  it changes a list that was there before \(train\.py:\d+\)$", said, flags=re.MULTILINE)
    shown = {without_lines(line) for line in said.splitlines()}
    kinds = r"^(?:reduce-scatter|all-reduce|all-gather|parameter|master weight|activations|Block|Noted) .*$"
    for kind in re.findall(kinds, PAGE.read_text(), flags=re.MULTILINE):
        assert without_lines(kind) in shown, kind
    for written in ("graph.json", "step.json", "step.mlir", "profile.json", "memory.png", "weight.svg", "timeline.png"):
        assert (tmp_path / written).stat().st_size > 100


def without_lines(said: str) -> str:
    """What is said, with single blanks and without the numbers of the script's lines."""
    return re.sub(r"train\.py:\d+", "train.py", " ".join(said.split()))


def test_links() -> None:
    assert broken_links(PAGE) == []
