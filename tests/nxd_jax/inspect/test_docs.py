"""docs/tutorials/look_inside.md: its code runs, from top to bottom, and its links lead somewhere."""

from __future__ import annotations

import pathlib
import re

import pytest

from tests.test_readme import broken_links

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "tutorials" / "look_inside.md"


@pytest.mark.filterwarnings("ignore:Use torch_xla:DeprecationWarning")
def test_the_code_runs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = list(re.finditer(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL))
    assert len(blocks) >= 7
    names: dict[str, object] = {"__name__": "look_inside_page"}
    for block in blocks:
        above = PAGE.read_text()[: block.start(1)].count("\n")
        exec(compile("\n" * above + block[1], str(PAGE), "exec"), names)
    said = capsys.readouterr().out
    assert "one rank, run 3 times" in said
    assert "an input of 0.up (aten.addmm) was float32[32, 64], now float32[16, 64]" in said
    assert re.search(r"^Noted +6 +0  it changes a list that was there before \(look_inside.md:\d+\)$", said, flags=re.MULTILINE)
    shown = {re.sub(r"look_inside\.md:\d+", "train.py", " ".join(line.split())) for line in said.splitlines()}
    for kind in re.findall(
        r"^(?:reduce-scatter|all-reduce|all-gather|parameter|master weight|activations|Block|Noted) .*$",
        PAGE.read_text(),
        flags=re.MULTILINE,
    ):
        assert re.sub(r"train\.py:\d+", "train.py", " ".join(kind.split())) in shown, kind
    for written in ("graph.json", "step.json", "step.mlir", "profile.json", "memory.png", "weight.svg", "timeline.png"):
        assert (tmp_path / written).stat().st_size > 100


def test_links() -> None:
    assert broken_links(PAGE) == []
