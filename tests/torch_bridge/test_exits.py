"""Whether a process knows at its end that `sys.exit` ended it with an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import torch_bridge

PRELUDE = f"""
import argparse, atexit, importlib.util, sys
spec = importlib.util.spec_from_file_location("exits", {str(Path(torch_bridge.__file__).parent / "mesh" / "exits.py")!r})
exits = importlib.util.module_from_spec(spec)
spec.loader.exec_module(exits)
exits.install()
atexit.register(lambda: print(exits.failure()))

def kept(how):
    try:
        sys.exit(3)
    except SystemExit:
        if how == "raise":
            raise
    return 5

def last():
    try:
        sys.exit(3)
    finally:
        print(end="")
"""

ENDS: dict[str, tuple[str, str | None, int]] = {
    "nothing": ("", None, 0),
    "exit": ("sys.exit(3)", "sys.exit(3)", 3),
    "a text": ("sys.exit('no data')", "sys.exit('no data')", 1),
    "no error": ("sys.exit(0)", None, 0),
    "nothing given": ("sys.exit()", None, 0),
    "arguments": ("argparse.ArgumentParser().parse_args(['--no'])", "sys.exit(2)", 2),
    "through finally": ("last()", "sys.exit(3)", 3),
    "raised again": ("kept('raise')", "sys.exit(3)", 3),
    "caught": ("kept('')", None, 0),
    "caught by the script": ("try:\n    sys.exit(3)\nexcept SystemExit:\n    print(end='')\nprint(end='')", None, 0),
}


@pytest.mark.parametrize("name", ENDS)
def test_how_a_script_ends(name: str) -> None:
    code, words, status = ENDS[name]
    done = subprocess.run([sys.executable, "-S", "-c", PRELUDE + code], capture_output=True, text=True, timeout=60)
    expected = "None" if words is None else f"Failure(words={words!r}, status={status})"
    assert done.stdout.strip() == expected and done.returncode == status, done.stderr


@pytest.mark.parametrize("end", ["", "sys.exit(3)"])
def test_a_process_that_fails_at_its_end(end: str, tmp_path: Path) -> None:
    """Everything else is done as ever: functions that come later, and streams are written out."""
    code = "import threading\nthreading._register_atexit(exits.fail, 'no room')\nsys.stderr.write('err')\n"
    done = subprocess.run([sys.executable, "-S", "-c", PRELUDE + code + end], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("Failure(words='no room', status=120)", "err", 120)


def test_a_process_without_stderr_that_fails() -> None:
    code = (
        "sys.stderr = None\nexits.fail('no room')\nexits.fail('again')\nassert exits.failure().words == 'again'\nexits.sys.stderr.flush()\n"
    )
    done = subprocess.run([sys.executable, "-S", "-c", PRELUDE + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 120, done.stdout
