"""`examples/abstract_llama.py` on a tiny size."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "abstract_llama.py"


def test_the_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--size", "tiny", "--tp", "4", "--dp", "24", "--layers", "1", "--seq", "32"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    assert said.startswith("Llama tiny, TP 4 x DP 24:\n96 cores (dp 24 x tp 4), each a core of Trainium1")
    assert "all-gather along tp (groups of 4)" in said and said.rstrip().splitlines()[-2].endswith(": fits")


def test_a_pipeline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "llama3-tiny", "--pp", "4", "--tp", "4", "--dp", "6", "--layers", "8", "--seq", "32", "--schedule", "zb_h1"]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *options])
    monkeypatch.setattr(sys, "path", list(sys.path))
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    assert said.startswith("Llama tiny, PP 4 x TP 4 x DP 6:\n96 cores (pp 4 x dp 6 x tp 4), each a core of Trainium1")
    for part in (
        "(zb_h1, 4 stages, 8 micro-batches)",
        "\n1-2 ",
        "backward of the weights",
        "pipeline bubble",
        "permute along pp",
        ": fits\n",
    ):
        assert part in said, part
