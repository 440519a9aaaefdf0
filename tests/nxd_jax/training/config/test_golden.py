"""The reports on the original's 22 conf files at their sizes, against a file that people read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nxd_jax.training.config import conf_files, golden


def test_there_are_22() -> None:
    assert len(conf_files.DIFFERENCES) == 22 and list(golden.read()) == list(conf_files.DIFFERENCES)


@pytest.mark.core(keep=6)
@pytest.mark.parametrize("name", conf_files.DIFFERENCES)
def test_the_report_is_the_golden_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = golden.text(name, tmp_path)
    assert found == golden.read()[name], "python -m tests.nxd_jax.training.config.golden writes the file anew"
    assert "not known" not in found
    assert max(map(len, found.splitlines())) <= 120
