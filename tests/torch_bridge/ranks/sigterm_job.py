"""What `test_sigterm` runs in three processes: each rank says READY, and is then busy in a way of its own."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch_xla

import torch_bridge.torch_xla.distributed.xla_backend  # noqa: F401


def compiles() -> None:
    """A program that takes XLA much longer than the test waits."""
    x = torch.ones(7, 7, device="xla")
    for k in range(3000):
        x = (x.sin() @ x if k % 3 else x.cos().cumsum(k % 2)) + k
    torch_xla.sync()


def waits(x: torch.Tensor) -> None:
    """In a collective that the others never reach."""
    dist.all_reduce(x)
    x.tolist()


def handles() -> None:
    """With a handler made before the first tensor (see `main`)."""
    time.sleep(100)


def on_terminate(*_: Any) -> None:
    sys.stdout.write("own handler\n")
    sys.stdout.flush()
    sys.exit(7)


def main() -> None:
    if int(os.environ["RANK"]) == 0:
        signal.signal(signal.SIGTERM, on_terminate)
    dist.init_process_group("xla")
    rank = dist.get_rank()
    x = torch.ones(4, device="xla")
    dist.all_reduce(x)
    sys.stdout.write(f"READY {rank} {x.tolist()}\n")
    sys.stdout.flush()
    (handles, lambda: waits(x), compiles)[rank]()
    sys.stdout.write("DONE\n")


if __name__ == "__main__":
    main()
