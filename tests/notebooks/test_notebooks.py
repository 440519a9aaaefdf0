"""The notebooks run from start to end without errors and warnings, and are what their scripts say, without outputs."""

from __future__ import annotations

import re
import time
from pathlib import Path

import nbformat
import pytest

from tests.notebooks import pairs
from tests.notebooks.running import SECONDS, complaints, run

SOURCES = pairs.sources()
NAMES = [source.stem for source in SOURCES]


SLOW = ("6_will_it_fit", "7_pipelines", "10_fine_tuning_and_preferences")
"""Run with --all alone."""


SAME_BITS = ("8_mixture_of_experts",)
"""What compares losses bit for bit."""


@pytest.mark.parametrize(
    "source", [pytest.param(s, id=s.stem, marks=[pytest.mark.slow, pytest.mark.thorough] * (s.stem in SLOW)) for s in SOURCES]
)
def test_runs(source: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    done = run(pairs.notebook(source), tmp_path, source.stem in SAME_BITS)
    assert list(complaints(done)) == []
    assert time.monotonic() - started < SECONDS


def test_there_are_eleven() -> None:
    assert [name.partition("_")[0] for name in NAMES] == [str(n) for n in range(1, 12)]


@pytest.mark.parametrize("source", SOURCES, ids=NAMES)
def test_pairs_agree_and_outputs_are_stripped(source: Path) -> None:
    there = source.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert there == pairs.text(source), "run `make notebooks`"
    for cell in nbformat.reads(there, as_version=4).cells:
        assert cell.cell_type == "markdown" or (cell.outputs == [] and cell.execution_count is None)


@pytest.mark.parametrize("source", SOURCES, ids=NAMES)
def test_has_a_title_and_something_to_try(source: Path) -> None:
    cells = pairs.notebook(source).cells
    assert re.match(rf"# {source.stem.partition('_')[0]}\. \w", cells[0].source)
    assert cells[-1].cell_type == "markdown"
    assert "## Something to try\n" in cells[-1].source
    assert not re.search(r"(^|[\s\"'(])/(home|work|root|tmp|Users)/", source.read_text(encoding="utf-8"))


def test_readme_has_a_line_for_each() -> None:
    readme = (pairs.FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"({name}.ipynb)" in readme for name in NAMES)


def test_refresh_writes_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "notebooks"
    folder.mkdir()
    (folder / "1_one.py").write_text("# %% [markdown]\n# # 1. One\n\n# %%\n1 + 1\n")
    (folder / "2_gone.ipynb").write_text("{}")
    monkeypatch.setattr(pairs, "FOLDER", folder)
    pairs.main()
    assert capsys.readouterr().out.split() == ["wrote", "notebooks/1_one.ipynb", "removed", "notebooks/2_gone.ipynb"]
    assert [cell.source for cell in nbformat.read(folder / "1_one.ipynb", as_version=4).cells] == ["# 1. One", "1 + 1"]
    pairs.main()
    assert capsys.readouterr().out == ""


def test_complaints_name_the_cell() -> None:
    """Of a notebook that goes wrong, made by hand: a kernel takes seconds to start."""
    cell = nbformat.v4.new_code_cell(
        "import this\nthis.fails()",
        outputs=[
            nbformat.v4.new_output("stream", name="stdout", text="fine\n"),
            nbformat.v4.new_output(
                "stream", name="stderr", text="nxd_jax: 8 ranks in 1 process(es), on 8 virtual CPU devices\nsome warning\n"
            ),
            nbformat.v4.new_output("error", ename="AttributeError", evalue="no fails", traceback=[]),
        ],
    )
    assert list(complaints(nbformat.v4.new_notebook(cells=[cell]))) == [
        "some warning in the cell that begins with 'import this'",
        "AttributeError: no fails in the cell that begins with 'import this'",
    ]
