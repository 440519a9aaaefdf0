"""Which Python the commands run scripts with."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from nxd_jax import interpreter

STATUS = {"both": 0, "torch alone": 2, "nothing": 6}


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another environment's `python`, first on the path. Its status says which packages it has."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    monkeypatch.setenv("PATH", f"{python.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("PYTHON_EXEC", raising=False)
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/nxd-run", "--nproc_per_node", "2", "s.py"])
    return python


def has(python: Path, what: str) -> None:
    python.write_text(f"#!/bin/sh\nexit {STATUS[what]}\n")
    python.chmod(0o755)


def test_the_environments_own(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command starts again with it."""
    has(other, "both")
    started: list[object] = []
    monkeypatch.setattr(os, "execv", lambda *call: started.append(call))
    interpreter.use("nxd-run", "nxd_jax.run")
    assert started == [(str(other), [str(other), "-m", "nxd_jax.run", "--nproc_per_node", "2", "s.py"])]


@pytest.mark.parametrize("what", ["torch alone", "nothing"])
def test_one_without_nxd_jax(what: str, other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    has(other, what)
    assert interpreter.chosen("nxd-run") is None
    said = f"nxd-run: runs with {sys.executable}: {other}, which `python` is here, has torch but not nxd_jax. Install nxd_jax there to use it\n"
    assert capsys.readouterr().err == (said if what == "torch alone" else "")


def test_this_one(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `python` is of the same environment, nothing is started; nor where the command was not called by its name."""
    has(other, "both")
    monkeypatch.setattr(sys, "executable", str(other.parent / "python3.11"))
    assert interpreter.chosen("nxd-run") is None
    monkeypatch.setattr(sys, "executable", "/elsewhere/python")
    monkeypatch.setattr(sys, "argv", ["/checkout/nxd_jax/run.py", "s.py"])
    monkeypatch.setattr(os, "execv", lambda *call: pytest.fail("started"))
    interpreter.use("nxd-run", "nxd_jax.run")


def test_one_that_is_named(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for torchrun: without asking what it has."""
    has(other, "nothing")
    monkeypatch.setenv("PYTHON_EXEC", str(other))
    assert interpreter.chosen("nxd-run") == str(other)
    monkeypatch.setenv("PYTHON_EXEC", "/no/such/python")
    with pytest.raises(SystemExit, match="nxd-run: PYTHON_EXEC=/no/such/python: there is no such program; name a Python, or unset it"):
        interpreter.chosen("nxd-run")


def test_the_question_that_is_asked() -> None:
    import subprocess

    assert subprocess.run([sys.executable, "-c", interpreter._HAS], check=False).returncode == 0
    found = subprocess.run([sys.executable, "-S", "-I", "-c", interpreter._HAS], check=False).returncode
    assert found == 6  # without its packages
