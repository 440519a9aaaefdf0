"""Several Python processes (torchrun): JAX's distributed runtime, and small exchanges between the processes through torch's store."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from typing import Any

import torch.distributed as dist

from torch_bridge import world

_started = False
_store: Any = None
_counts: dict[str, int] = {}


def store() -> Any:
    """A key-value store that all processes see: torchrun's, under a prefix of our own."""
    global _store
    if _store is None:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE") if not os.environ.get(name)]
        if missing:
            raise RuntimeError(f"several processes need {', '.join(missing)} in the environment; start them with torchrun")
        found, _, _ = next(iter(dist.rendezvous("env://")))
        _store = dist.PrefixStore("nxd_jax", found)
    return _store


def start(of: world.World) -> None:
    """Join JAX's distributed runtime; each process brings one device for each rank that it hosts."""
    global _started
    if _started:
        return
    import jax

    from torch_bridge import sharding

    if sharding._started():
        raise RuntimeError(
            "JAX started before the processes found each other: put the first tensor on xla after torch.distributed.init_process_group('xla')"
        )
    here = len(of.hosted)
    index = world.process_index()
    if index == 0:
        store().set("jax_coordinator", f"{_own_address()}:{_free_port()}")
    address = store().get("jax_coordinator").decode()
    platforms = getattr(jax.config, "jax_platforms", None) or ""
    if platforms in ("", "cpu"):
        jax.config.update("jax_num_cpu_devices", here)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=of.processes, process_id=index)
    _started = True
    _end_at_once_after_errors()


def _end_at_once_after_errors() -> None:
    """Let a process that an exception ends leave without JAX's farewell, which waits minutes for the others, while they wait for this one in a collective."""
    hook, failed = sys.excepthook, []

    def note(*error: Any) -> None:
        failed.append(error[0])
        hook(*error)

    def leave() -> None:
        if failed:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    sys.excepthook = note
    atexit.register(leave)  # before JAX's, which was registered earlier


def _own_address() -> str:
    return os.environ.get("MASTER_ADDR") or "127.0.0.1"


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


def exchange(tag: str, payload: bytes) -> list[bytes]:
    """Every process's payload, in process order. All processes call it with the same tag; it waits for all."""
    count = world.process_count()
    if count == 1:
        return [payload]
    number = _counts[tag] = _counts.get(tag, 0) + 1
    key = f"{tag}/{number}"
    shared = store()
    shared.set(f"{key}/{world.process_index()}", payload)
    found = [shared.get(f"{key}/{k}") for k in range(count)]
    if shared.add(f"{key}/read", 1) == count:
        for k in range(count):
            shared.delete_key(f"{key}/{k}")
    return found


def barrier(tag: str) -> None:
    """Wait until every process is here."""
    exchange(f"barrier {tag}", b"x")
