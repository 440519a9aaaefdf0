"""SIGTERM in processes without JAX: workers, handlers that call ours, and who had the pipe before."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import jax

from torch_bridge import _compat

ROOT = pathlib.Path(__file__).parents[2]


def run(code: str) -> subprocess.CompletedProcess[str]:
    """A process that watches for SIGTERM as rank 0 of 2 and then runs this code."""
    start = "import os, signal, sys, time\nfrom torch_bridge.mesh import termination\ntermination.install('rank 0 of 2')\n"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'aliases'}"}
    return subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, timeout=60, env=environment)


def test_a_fork_ends_alone_and_in_silence() -> None:
    code = """
found = set()
for _ in range(50):  # also at once, before the child has run a line
    pid = os.fork()
    if pid == 0:
        time.sleep(20)
        os._exit(1)
    os.kill(pid, signal.SIGTERM)
    found.add(os.WTERMSIG(os.waitpid(pid, 0)[1]))
time.sleep(0.2)
print("parent", found, termination.seen())
"""
    done = run(code)
    assert (done.stdout, done.returncode) == ("parent {15} False\n", 0) and "SIGTERM" not in done.stderr


def test_called_by_another_handler_it_does_nothing() -> None:
    code = """
before = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *args: (before(*args), print("own")))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.2)
print(termination.seen())
"""
    done = run(code)
    assert (done.stdout, done.returncode) == ("own\nTrue\n", 0) and "SIGTERM" not in done.stderr


def test_without_a_handler_of_its_own_it_dies_of_the_signal_and_says_so_once() -> None:
    done = run("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)")
    assert done.returncode == -signal.SIGTERM and done.stderr.count("rank 0 of 2") == done.stderr.count("ended by SIGTERM\n") == 1


def test_the_pipe_is_shared_with_who_had_it() -> None:
    code = """
reading, writing = os.pipe()
os.set_blocking(writing, False)
signal.set_wakeup_fd(writing)
termination.install("again")
signal.signal(signal.SIGUSR1, lambda *_: None)
os.kill(os.getpid(), signal.SIGUSR1)
print(list(os.read(reading, 8)) == [signal.SIGUSR1])
"""
    assert run(code).stdout == "True\n"


def test_jaxs_preemption_service_is_off_unless_asked_for(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    assert jax.config.jax_enable_preemption_service
    with _compat.without_preemption_service():
        assert not jax.config.jax_enable_preemption_service
    assert jax.config.jax_enable_preemption_service
    monkeypatch.setenv("JAX_ENABLE_PREEMPTION_SERVICE", "true")
    with _compat.without_preemption_service():
        assert jax.config.jax_enable_preemption_service
