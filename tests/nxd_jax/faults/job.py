"""A small training that faults are put into: `train(folder, kind, fault)` is what one process of a job does.

kind: "nxd" (data parallelism, `nxd.save_checkpoint`, every other save in the background) or "fsdp" (shards, a file for each rank). It goes on from the newest
complete checkpoint, saves after every second step, and notes what it does as lines of JSON in `folder/rank_R.jsonl`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import neuronx_distributed as nxd
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_backend  # the backend "xla"
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

from tests.nxd_jax.faults.plan import EVERY, STEPS
from torch_bridge.recorder import sharded


class Fault(NamedTuple):
    """What happens to a rank. what: see `FAULTS`; step: while it does this one, `delay` seconds after it began; seconds: how long it is slow."""

    what: str
    rank: int
    step: int
    delay: float = 0.0
    seconds: float = 0.0


def _signal(number: int, whom: Callable[[], int]) -> Callable[[Fault, Callable[..., None]], None]:
    def later(fault: Fault, note: Callable[..., None]) -> None:
        def now() -> None:
            note(fault=fault.what)
            os.kill(whom(), number)

        threading.Timer(fault.delay, now).start()

    return later


def _slow(fault: Fault, note: Callable[..., None]) -> None:
    note(fault=fault.what)
    time.sleep(fault.seconds)


def _hold(fault: Fault, note: Callable[..., None]) -> None:
    """Nothing of Python runs in this process meanwhile."""
    note(fault=fault.what)
    ctypes.PyDLL(None).usleep(int(fault.seconds * 1e6))


def _fill(fault: Fault, note: Callable[..., None]) -> None:
    """The rest of a small file system, see `room`."""
    note(fault=fault.what)
    with contextlib.suppress(OSError), (FOLDER / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))


FOLDER = Path()
"""Of the checkpoints."""

FAULTS: dict[str, Callable[[Fault, Callable[..., None]], None]] = {
    "kill": _signal(signal.SIGKILL, os.getpid),
    "stop": _signal(signal.SIGSTOP, os.getpid),
    "term": _signal(signal.SIGTERM, os.getpid),
    "launcher": _signal(signal.SIGKILL, os.getppid),
    "slow": _slow,
    "hold": _hold,
    "full": _fill,
}


class Notes:
    """What this process did, with the time."""

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, **what: Any) -> None:
        os.write(self._file, f"{json.dumps({'at': time.time(), **what})}\n".encode())


class Nxd:
    """A module, replicated, with NxD's trainer and checkpoints."""

    def __init__(self, folder: Path):
        self.folder = folder / "saved"
        config = nxd.neuronx_distributed_config(tensor_parallel_size=1, optimizer_config={"zero_one_enabled": True})
        self.model = nxd.initialize_parallel_model(config, net)
        self.optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, self.model.parameters(), lr=0.05)

    def load(self) -> int:
        if not nxd.has_checkpoint(str(self.folder)):
            return 0
        return int(nxd.load_checkpoint(str(self.folder), None, self.model, self.optimizer))

    def save(self, step: int) -> None:
        aside = bool(step // EVERY % 2)
        nxd.save_checkpoint(str(self.folder), f"step_{step}", self.model, self.optimizer, user_content=step, async_save=aside)

    def complete(self) -> list[int]:
        return sorted(int(p.parent.name.split("_")[1]) for p in self.folder.glob("step_*/done"))


class Fsdp:
    """Shards, saved by each rank; rank 0 marks what is complete."""

    def __init__(self, folder: Path):
        self.folder = folder / "saved"
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.model: Any = XlaFullyShardedDataParallel(net())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def _file(self, step: int) -> Path:
        return self.folder / f"step_{step}" / f"rank-{self.rank}-of-{self.ranks}.pth"

    def load(self) -> int:
        found = self.complete()
        if not found:
            return 0
        state = torch.load(self._file(found[-1]), weights_only=False)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return found[-1]

    def save(self, step: int) -> None:
        file = self._file(step)
        file.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "shard_metadata": self.model.get_shard_metadata(),
            "optimizer": self.optimizer.state_dict(),
        }
        xm.save(state, file, master_only=False)
        xm.rendezvous(f"saved {step}")
        if self.rank == 0:
            (file.parent / "done").touch()

    def complete(self) -> list[int]:
        return sorted(int(p.parent.name.split("_")[1]) for p in self.folder.glob("step_*/done"))


KINDS: dict[str, Callable[[Path], Any]] = {"nxd": Nxd, "fsdp": Fsdp}


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def batches(rank: int) -> Iterator[torch.Tensor]:
    for step in range(1, STEPS + 1):
        yield torch.linspace(-1, 1, 24).view(4, 6) * (rank + 1) / step


def train(folder: Path, kind: str, fault: Fault | None) -> None:
    """What a process does; its rank and how many there are are in the environment."""
    global FOLDER
    FOLDER = folder / "saved"
    dist.init_process_group("xla", init_method="xla://")
    rank = dist.get_rank()
    note = Notes(folder / f"rank_{rank}.jsonl")
    note(pid=os.getpid(), parent=os.getppid())
    job = KINDS[kind](folder)
    begun = job.load()
    note(begun=begun)
    for step, x in enumerate(batches(int(rank)), 1):
        if step <= begun:
            continue
        note(step=step)
        if fault is not None and (rank, step) == fault[1:3]:
            FAULTS[fault.what](fault, note)
        job.optimizer.zero_grad()
        loss = job.model(x.to("xla")).square().mean()
        loss.backward()
        job.optimizer.step()
        torch_xla.sync()
        note(done=step, loss=[float(t).hex() for t in sharded.shards(loss.detach())])
        if step % EVERY == 0:
            job.save(step)
            note(saved=step)
    if kind == "nxd":
        nxd.finalize_checkpoint()
    xm.rendezvous("end")
    note(ended=True)


if __name__ == "__main__":
    what = json.loads(os.environ.get("FAULT", "null"))
    train(Path(sys.argv[1]), sys.argv[2], what and Fault(*what))
