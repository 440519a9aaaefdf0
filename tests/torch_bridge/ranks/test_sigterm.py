"""SIGTERM in real processes: one in a collective, one that compiles, one with a handler of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import ports
from tests.torch_bridge.ranks import sigterm_job

ROOT = Path(__file__).parents[3]
RANKS = 3
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]


def start(command: list[str], **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'aliases'}", "JAX_NUM_CPU_DEVICES": "1", **variables}
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([*command, sigterm_job.__file__], text=True, env=environment, **pipe)


def read_until_ready(process: subprocess.Popen[str], count: int) -> str:
    found = ""
    while found.count("READY") < count:
        line = process.stdout.readline()  # type: ignore[union-attr]
        assert line, (found, process.wait())
        found += line
    return found


def kill(processes: list[subprocess.Popen[str]]) -> None:
    """Leave nothing behind that a later test would hear of."""
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def end(processes: list[subprocess.Popen[str]]) -> tuple[list[str], list[float]]:
    """What each prints after SIGTERM, and the seconds until it has ended, the last process first."""
    time.sleep(1)  # into the collective and the compiler
    began = time.monotonic()
    for process in processes:
        process.send_signal(signal.SIGTERM)
    try:
        found = [(process.communicate(timeout=60)[0], time.monotonic() - began) for process in reversed(processes)]
    finally:
        kill(processes)
    texts, seconds = zip(*reversed(found), strict=True)
    return list(texts), list(seconds)


AT_ONCE = """
import os, signal
from torch_bridge.mesh import termination
signal.signal(signal.SIGTERM, lambda *_: None)
termination.install("this process")
assert not termination.seen()
os.kill(os.getpid(), signal.SIGTERM)  # keeps the interpreter's lock: the thread that watches cannot have run
assert termination.seen()
if os.fork() == 0:
    assert termination.seen()
    os._exit(0)
assert os.wait()[1] == 0
"""


def test_a_handler_that_ends_the_process_at_once_knows_of_the_signal() -> None:
    done = subprocess.run([sys.executable, "-c", AT_ONCE], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_each_process_ends_as_it_should() -> None:
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.free()), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    processes = [start([sys.executable], **common, RANK=str(k), LOCAL_RANK=str(k)) for k in range(RANKS)]
    try:
        for process in processes:
            read_until_ready(process, 1)
    except BaseException:
        kill(processes)
        raise
    (handling, waiting, compiling), seconds = end(processes)
    assert [process.returncode for process in processes] == [7, -signal.SIGTERM, -signal.SIGTERM], (handling, waiting, compiling)
    assert (
        max(seconds[1:]) < 3 and seconds[0] < 10
    )  # its handler is called at once; it waits 2 s for the others, and Python takes its time to end
    assert "own handler" in handling and "ended by SIGTERM" not in handling
    for rank, text in (1, waiting), (2, compiling):
        assert f"nxd_jax: rank {rank} of 3 (pid {processes[rank].pid}) ended by SIGTERM" in text and "DONE" not in text


@pytest.mark.slow
def test_torchrun() -> None:
    launcher = start(TORCHRUN)
    read_until_ready(launcher, RANKS)
    (text,), (seconds,) = end([launcher])
    assert launcher.returncode != 0 and seconds < 15  # torchrun would kill after 30
    assert "own handler" in text and "forcefully exiting" not in text, text
    assert text.count("ended by SIGTERM") == 2, text
