"""Jobs of four processes with a fault in each: what every process said and did, and what the next job made of it.

    python -m tests.nxd_jax.faults.jobs FOLDER KIND LAUNCHER FAULT...

KIND: nxd or fsdp (see `job`). LAUNCHER: forked (the processes know each other, as under plain srun) or torchrun (two launchers, as on two machines, with two
processes each). FAULT: `what:rank:step[:delay[:seconds]]`. Prints one line of JSON: the losses of a job without a fault, and for each fault a `Life`.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests import ports, quick
from tests.nxd_jax.faults import job, room
from tests.nxd_jax.faults.job import Fault
from torch_bridge import _compat
from torch_bridge.config import fork_guard
from torch_bridge.mesh import world

PROCESSES = 4
LIMIT = 150
"""Seconds that a job may take in all, on a machine that others use too."""
ROOT = Path(__file__).resolve().parents[3]


class Ended(NamedTuple):
    """A process. status: its exit status, negative for a signal, None if it had to be killed; after: seconds from the fault to its end; said: its output;
    did: its notes."""

    status: int | None
    after: float
    said: str
    did: list[dict[str, Any]]


class Life(NamedTuple):
    """A job with a fault, and the one after it. complete: steps whose checkpoints were complete in between."""

    fault: Fault
    processes: list[Ended]
    launchers: list[str]
    complete: list[int]
    next: list[Ended]


def parse(text: str) -> Fault:
    what, rank, step, *numbers = text.split(":")
    return Fault(what, int(rank), int(step), *map(float, numbers))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Forked:
    """Processes without a launcher."""

    def __init__(self, folder: Path, kind: str, fault: Fault | None):
        self.folder, port = folder, ports.free()
        self.pids = [self._fork(rank, port, kind, fault) for rank in range(PROCESSES)]
        self.found: dict[int, tuple[int | None, float]] = {}

    def _fork(self, rank: int, port: int, kind: str, fault: Fault | None) -> int:
        pid = os.fork()
        if pid:
            return pid
        out = os.open(self.folder / f"said_{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(PROCESSES))
        os.environ.update(sizes, RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        fork_guard._forked = False  # JAX has not started
        world.configure(None)
        status = 0
        try:
            job.train(self.folder, kind, fault)
        except SystemExit as ending:
            status = int(ending.code or 0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            status = 1
        threading._shutdown()  # type: ignore[attr-defined]  # what Python does at the end of a script
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def poll(self) -> bool:
        """Whether all have ended, as far as they can: one that is stopped stays."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.found:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.found[rank] = os.waitstatus_to_exitcode(status), time.time()
        return len(self.found) == PROCESSES

    def kill(self) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self.found:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self.found[rank] = None, time.time()

    def said(self) -> tuple[list[str], list[str]]:
        return [(self.folder / f"said_{rank}").read_text() for rank in range(PROCESSES)], []


class Torchrun:
    """Two launchers on the loopback."""

    def __init__(self, folder: Path, kind: str, fault: Fault | None):
        self.folder, port = folder, ports.free()
        env = os.environ | {"FAULT": json.dumps(fault)}
        self.launchers = []
        self.found: dict[int, tuple[int | None, float]] = {}
        for node in range(2):
            command = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "torch.distributed.run",
                "--nnodes=2",
                "--nproc_per_node=2",
                f"--node_rank={node}",
            ]
            command += ["--master_addr=127.0.0.1", f"--master_port={port}", "--log-dir", str(folder / f"logs_{node}"), "--redirects", "3"]
            with (folder / f"launcher_{node}").open("w") as out:
                command += ["-m", "tests.nxd_jax.faults.job", str(folder), kind]
                self.launchers.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=out, stderr=out))

    def _pids(self) -> dict[int, int]:
        return {rank: notes[0]["pid"] for rank in range(PROCESSES) if (notes := read(self.folder / f"rank_{rank}.jsonl"))}

    def poll(self) -> bool:
        ended = all(launcher.poll() is not None for launcher in self.launchers)
        pids = self._pids()
        for rank, pid in pids.items():
            if rank not in self.found and not alive(pid):
                self.found[rank] = 0, time.time()
        return ended and len(self.found) == len(pids)

    def kill(self) -> None:
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()
        for rank, pid in self._pids().items():
            if rank not in self.found:
                os.kill(pid, signal.SIGKILL)
                self.found[rank] = None, time.time()

    def said(self) -> tuple[list[str], list[str]]:
        texts = []
        for rank in range(PROCESSES):
            found = sorted((self.folder / f"logs_{rank // 2}").glob(f"*/attempt_*/{rank % 2}/std*.log"))
            texts.append("".join(path.read_text() for path in found))
        return texts, [(self.folder / f"launcher_{node}").read_text() for node in range(2)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


LAUNCHERS: dict[str, Callable[..., Forked | Torchrun]] = {"forked": Forked, "torchrun": Torchrun}


def run(folder: Path, kind: str, launcher: str, fault: Fault | None) -> tuple[list[Ended], list[str]]:
    """One job, to its end. A stopped process counts as ended when all others are; then it is killed, as an operator would."""
    for path in (*folder.glob("rank_*"), *folder.glob("said_*")):
        path.unlink()
    at = LAUNCHERS[launcher](folder, kind, fault)
    until = time.time() + LIMIT
    stopped = fault is not None and fault.what == "stop"
    try:
        while not at.poll() and time.time() < until and not (stopped and len(at.found) == PROCESSES - 1):
            time.sleep(0.05)
    finally:
        at.kill()
    texts, launchers = at.said()
    notes = [read(folder / f"rank_{rank}.jsonl") for rank in range(PROCESSES)]
    struck = next((n["at"] for did in notes for n in did if "fault" in n), time.time())
    return [
        Ended(*(at.found.get(rank, (None, 0.0))[:1]), round(at.found.get(rank, (None, struck))[1] - struck, 2), texts[rank], notes[rank])
        for rank in range(PROCESSES)
    ], launchers


def complete(folder: Path) -> list[int]:
    """The steps with a complete checkpoint."""
    return sorted(int(re.findall(r"step_(\d+)", str(p))[0]) for p in folder.glob("*/step_*/done"))


def life(folder: Path, kind: str, launcher: str, fault: Fault) -> Life:
    """A job with a fault, and the one after it."""
    with room.small(folder / "saved") if fault.what == "full" else contextlib.nullcontext():
        processes, launchers = run(folder, kind, launcher, fault)
        (folder / "saved" / "filler").unlink(missing_ok=True)
        there = complete(folder)
        after, _ = run(folder, kind, "forked", None)
    return Life(fault, processes, launchers, there, after)


def tell(what: Any) -> None:
    sys.stdout.write(f"{json.dumps(what)}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> None:
    root, kind, launcher, *faults = arguments
    prepare(Path(root))
    tell(run(made(Path(root) / "whole"), kind, "forked", None)[0])
    for number, text in enumerate(faults):
        tell(life(made(Path(root) / f"fault_{number}"), kind, launcher, parse(text)))


def prepare(root: Path) -> None:
    """Processes that are forked need not import anything, and compile what is new to all of them."""
    os.environ.update(quick.environment(), NEURON_COMPILE_CACHE_URL=str(root / "cache"))
    for name in (
        "orbax.checkpoint",
        "torch._dynamo",
        "nxd_jax.trainer.checkpoint",
        "nxd_jax.checkpoint.orbax_files",
        "torch_bridge.device.startup",
    ):
        importlib.import_module(name)
    assert not _compat.jax_started()


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    main(sys.argv[1:])
