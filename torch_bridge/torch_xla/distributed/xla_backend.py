"""`torch_xla.distributed.xla_backend`: importing it registers backend "xla" with torch.distributed.

`torch.distributed.init_process_group("xla")` works under torchrun, with `init_method="xla://"` or `"pjrt://"`, and, in a process that no
launcher started, with no further arguments.
"""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_bridge import world
from torch_bridge.torch_xla.distributed._process_group import ProcessGroupXla

__all__ = ["ProcessGroupXla", "new_xla_process_group"]

_store: dist.HashStore | None = None


def _create_xla_process_group(prefix_store: Any, rank: int, size: int, timeout: datetime.timedelta) -> ProcessGroupXla:
    return ProcessGroupXla(prefix_store, rank, size, timeout)


def _rendezvous(url: str, timeout: datetime.timedelta = dist.default_pg_timeout, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """`xla://` and `pjrt://`: the workers know each other already; the store is this process's memory."""
    global _store
    if _store is None:
        _store = dist.HashStore()
    yield _store, world.rank(), world.size()


_init_process_group = distributed_c10d.init_process_group


@functools.wraps(_init_process_group)
def _init(backend: str | None = None, init_method: str | None = None, *args: Any, **kwargs: Any) -> None:
    launched = "RANK" in os.environ or "WORLD_SIZE" in os.environ
    told = init_method or args or {"rank", "world_size", "store"} & kwargs.keys()
    if str(backend).lower() == "xla" and not launched and not told:
        init_method = "xla://"
    _init_process_group(backend, init_method, *args, **kwargs)


_new_group = distributed_c10d.new_group


@functools.wraps(_new_group)
def new_xla_process_group(
    ranks: Any = None,
    timeout: datetime.timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`torch.distributed.new_group`, which also understands `pg_options={"xla_pg_options": {"mesh": [[...], ...]}}`: the groups of all
    ranks at once.
    """
    group = _new_group(ranks, timeout, backend, pg_options, *args, **kwargs)
    if isinstance(group, ProcessGroupXla) and ranks is not None:
        options = pg_options.get("xla_pg_options", {}) if isinstance(pg_options, dict) else {}
        group._mesh = options.get("mesh") or [list(ranks)]
        world.members(group._mesh)
    return group


def _install() -> None:
    """Register once; a second import of this module under another name changes nothing."""
    if "XLA" in dist.Backend._plugins:
        return
    dist.Backend.register_backend("xla", _create_xla_process_group, devices=["xla"])
    dist.register_rendezvous_handler("xla", _rendezvous)
    dist.register_rendezvous_handler("pjrt", _rendezvous)
    for module in (dist, distributed_c10d):
        module.init_process_group = _init  # type: ignore[attr-defined]
        module.new_group = new_xla_process_group  # type: ignore[attr-defined]


_install()
