"""The command: its arguments, its output into a pipe, and a real terminal (a pseudo-terminal) while real jobs start, end and are killed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nxd_jax.top import command
from tests.nxd_jax.top.published import data, put

ROOT = pathlib.Path(__file__).parents[3]


# -- arguments, and output that is no terminal -----------------------------------------------------


def test_once(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--once", "--dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "No job is running. Start one: nxd-run --instance trn1.32xlarge script.py\n"
    put(tmp_path, data(pid=os.getpid(), ticks=None, updated=time.time()))
    assert command.main(["--dir", str(tmp_path)]) == 0, "without a terminal, once too"
    assert "train.py running" in capsys.readouterr().out


def test_json(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nxd-1-1.json").write_text("{")
    file = put(tmp_path, data(pid=os.getpid(), ticks=None))
    assert command.main(["-j", "--dir", str(tmp_path)]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found == {**data(pid=os.getpid(), ticks=None), "file": str(file), "life": "live"}


def test_errors(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--dir", str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in (text := capsys.readouterr().err) and "NXD_JAX_TOP_DIR of a job says where it publishes" in text
    for interval in ("0", "soon", "inf"):
        with pytest.raises(SystemExit, match="2"):
            command.main(["--interval", interval])
        assert f"'{interval}' must be seconds, 0.1 or more" in capsys.readouterr().err


# -- a terminal ------------------------------------------------------------------------------------

JOB = """
import os, sys, time, warnings, torch, torch_xla
x = torch.ones(8, 8).to("xla") + 1
torch_xla.sync()
warnings.simplefilter("ignore")
if os.fork() == 0:
    os._exit(0)  # as a worker of a DataLoader
os.wait()
while not os.path.exists(sys.argv[0] + ".stop"):
    x = x * 1.01
    torch_xla.sync()
    time.sleep(0.01)
"""


class Terminal:
    """`nxd-top` in a pseudo-terminal of 40 lines of 80 characters."""

    def __init__(self, folder: pathlib.Path):
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        self.settings = termios.tcgetattr(self.slave)
        self.raw = ""
        self.seen = 0
        environ = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nxd_jax.top", "--interval", "0.2", "--dir", str(folder)],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            cwd=ROOT,
            env={**environ, "TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONIOENCODING": "utf-8"},
        )

    def expect(self, pattern: str, seconds: float = 60.0) -> str:
        """Read until the pattern has been shown since the last match; gives what matched."""
        deadline = time.monotonic() + seconds
        while True:
            text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw[self.seen :])
            found = re.search(pattern, text)
            if found:
                self.seen = len(self.raw)
                return found[0]
            assert time.monotonic() < deadline, f"{pattern} was not shown:\n{text[-4000:]}"
            assert self.process.poll() is None or select.select([self.master], [], [], 0)[0], f"it ended:\n{text[-4000:]}"
            if select.select([self.master], [], [], 0.2)[0]:
                self.raw += os.read(self.master, 65536).decode(errors="replace")

    def ended(self) -> int:
        """Its exit status, once it has left; the rest of what it wrote is in `raw`."""
        deadline = time.monotonic() + 20
        while self.process.poll() is None or select.select([self.master], [], [], 0)[0]:
            assert time.monotonic() < deadline
            if select.select([self.master], [], [], 0.05)[0]:
                self.raw += os.read(self.master, 65536).decode(errors="replace")
        return self.process.returncode

    def restored(self) -> bool:
        """Whether the terminal is as it was: its settings, the normal screen, and the cursor."""
        after = [self.raw.rfind(code) for code in ("\x1b[?1049h", "\x1b[?1049l", "\x1b[?25l", "\x1b[?25h")]
        return termios.tcgetattr(self.slave) == self.settings and 0 <= after[0] < after[1] and 0 <= after[2] < after[3]


@pytest.fixture
def started(tmp_path: pathlib.Path) -> Iterator[Any]:
    """`started(thing)` remembers a process, or a terminal, to be ended after the test."""
    found: list[Any] = []
    yield lambda thing: found.append(thing) or thing
    for thing in found:
        process = thing.process if isinstance(thing, Terminal) else thing
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        if isinstance(thing, Terminal):
            os.close(thing.master)
            os.close(thing.slave)


def test_live_while_jobs_start_end_and_are_killed(tmp_path: pathlib.Path, started: Any) -> None:
    folder = tmp_path / "records"
    folder.mkdir()

    def job(name: str) -> subprocess.Popen[bytes]:
        (tmp_path / name).write_text(JOB)
        environ = {**os.environ, "NXD_JAX_TOP_DIR": str(folder), "NXD_JAX_TOP": "1", "JAX_NUM_CPU_DEVICES": "1"}
        environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")])
        return started(subprocess.Popen([sys.executable, tmp_path / name], cwd=tmp_path, env=environ))

    ending, killed = job("ending.py"), job("killed.py")
    terminal = started(Terminal(folder))
    terminal.expect("No job is running. Start one: nxd-run")
    terminal.expect("ending.py (running|compiling)")
    terminal.expect("killed.py (running|compiling)")
    terminal.expect(r"step [1-9][\d,]* · [\d.]+ s(teps/s|/step) · [1-9][\d,]* programs · busy")
    (folder / "nxd-1-1.json").write_text("{")
    killed.send_signal(signal.SIGKILL)
    terminal.expect("killed.py crashed pid")
    terminal.expect("ending.py running")
    (tmp_path / "ending.py.stop").write_text("")
    terminal.expect("ending.py ended pid")
    assert ending.wait(30) == 0 and killed.wait() == -signal.SIGKILL
    assert [file.name for file in folder.iterdir() if str(ending.pid) in file.name] == [], "a record goes with its process"
    os.write(terminal.master, b"xq")
    assert terminal.ended() == 0 and terminal.restored()
    assert "Traceback" not in terminal.raw


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_signals_leave_the_terminal_as_it_was(tmp_path: pathlib.Path, started: Any, number: int, status: int) -> None:
    terminal = started(Terminal(tmp_path))
    terminal.expect("q leaves")
    terminal.process.send_signal(number)
    assert terminal.ended() == status and terminal.restored()
    assert "Traceback" not in terminal.raw
