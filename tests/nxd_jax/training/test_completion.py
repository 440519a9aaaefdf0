"""Keys that a shell completes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from nxd_jax.training import completion

TEXT = "trainer: {devices: 2, max_steps: 3}\nmodel:\n  fusions: {flash_attention: True}\n  lr: 1\nname: x\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "c.yaml"
    found.write_text(TEXT)
    return found


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("", ["model.", "name=", "trainer."]),
        ("mo", ["model."]),
        ("model.", ["model.fusions.", "model.lr="]),
        ("trainer.m", ["trainer.max_steps="]),
        ("trainer.max_steps=", ["trainer.max_steps=3"]),
        ("model.fusions.flash_attention=", ["model.fusions.flash_attention=True", "model.fusions.flash_attention=False"]),
        ("model.fusions.flash_attention=F", ["model.fusions.flash_attention=False"]),
        ("zzz.", []),
        ("name.", []),
        ("zzz=", []),
        ("--ch", ["--check"]),
    ],
)
def test_words(file: Path, typed: str, expected: list[str]) -> None:
    assert completion.complete(f"nxdt-train {file} {typed}", ["--check", "--plan"]) == expected


def test_without_a_file_the_shell_completes_files(tmp_path: Path) -> None:
    assert completion.complete("nxdt-train tr", []) == []
    (tmp_path / "bad.yaml").write_text("a: [")
    assert completion.complete(f"nxdt-train {tmp_path / 'bad.yaml'} a", []) == []


def test_scripts(tmp_path: Path) -> None:
    assert "bashcompinit" in completion.script("zsh")
    with pytest.raises(ValueError, match=r"--completion fish: must be one of bash, zsh"):
        completion.script("fish")
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    (tmp_path / "nxdt-train").write_text("#!/bin/sh\nprintf 'model.lr=1\\nmodel.lr=2\\n'\n")
    (tmp_path / "nxdt-train").chmod(0o755)
    line = "nxdt-train c.yaml model.lr="
    run = f'{completion.script("bash")}\nCOMP_LINE="{line}"; COMP_POINT={len(line)}; _nxdt_train; echo "${{COMPREPLY[@]}}"'
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.run([bash, "-c", run], env=environ, capture_output=True, text=True, check=True).stdout == "1 2\n"
