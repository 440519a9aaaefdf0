"""Backend "xla" of torch.distributed: importing this registers it.

`torch.distributed.init_process_group("xla")` works under torchrun, with `init_method="xla://"` or `"pjrt://"`, and, in a process that no
launcher started, with no further arguments.
"""

from __future__ import annotations

import datetime
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_bridge.collectives import device_mesh, joins, object_collectives, reducers, sync_batch_norm
from torch_bridge.collectives.process_group import ProcessGroupXla
from torch_bridge.mesh import groups as rank_groups
from torch_bridge.mesh import rank_numbers as ranks_of
from torch_bridge.mesh import world
from torch_bridge.script import rank_environment

if TYPE_CHECKING:
    from torch.types import Device

_store: dist.HashStore | None = None


def _create_xla_process_group(prefix_store: Any, rank: int, size: int, timeout: datetime.timedelta) -> ProcessGroupXla:
    return ProcessGroupXla(prefix_store, rank, size, timeout)


def _rendezvous(url: str, timeout: datetime.timedelta = dist.default_pg_timeout, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """`xla://` and `pjrt://`: the workers know each other already; the store is this process's memory."""
    global _store
    if _store is None:
        _store = dist.HashStore()
    if world.process_count() > 1:
        yield from dist.rendezvous("env://", world.process_index(), world.process_count(), timeout=timeout)
        return
    yield _store, world.first(), world.size()


_init_process_group = distributed_c10d.init_process_group
_EARLY = "transformers.training_args"
"""It makes the process group when it is imported under torchrun. Scripts that are older than this make it behind that import, too: the group stays."""
_made_early = False
"""Whether it made the one that is there, and no script has asked for one yet."""


@functools.wraps(_init_process_group)
def init_process_group(backend: str | None = None, init_method: str | None = None, *args: Any, **kwargs: Any) -> None:
    global _made_early
    ours = str(backend).lower() == "xla"
    if ours and _made_early and dist.is_initialized():
        _made_early = False
        return
    if ours and world.process_count() == 1 and "store" not in kwargs:
        launched = "RANK" in os.environ or "WORLD_SIZE" in os.environ
        told = init_method or args or {"rank", "world_size"} & kwargs.keys()
        if world.size() > 1 or not (launched or told):  # one process is all there is: what it was told about its rank stands for all
            kwargs, init_method = _without_numbers(kwargs), "xla://"
    elif ours and len(world.current().hosted) > 1 and "store" not in kwargs:  # torch would take the numbers of ranks for those of processes
        kwargs, init_method = _without_numbers(kwargs), "xla://"
    _init_process_group(backend, init_method, *args, **kwargs)
    if ours:
        rank_environment.note()
        _made_early = sys._getframe(1).f_globals.get("__name__") == _EARLY
        refresh()


def _without_numbers(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if k not in ("rank", "world_size")}


_new_group = distributed_c10d.new_group


@functools.wraps(_new_group)
def new_xla_process_group(
    ranks: Any = None,
    timeout: datetime.timedelta | None = None,
    backend: str | None = None,
    pg_options: object = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`torch.distributed.new_group`, which also understands `pg_options={"xla_pg_options": {"mesh": [[...], ...]}}`: the groups of all
    ranks at once. In a process that hosts several ranks, groups with another backend are xla's too: members of a gloo group would wait for each other for ever.
    """
    if world.process_count() == 1 and world.size() > 1 and isinstance(distributed_c10d._get_default_group(), ProcessGroupXla):
        backend = None
    group = _new_group(ranks, timeout, backend, pg_options, *args, **kwargs)
    if isinstance(group, ProcessGroupXla) and ranks is not None:
        options = pg_options.get("xla_pg_options", {}) if isinstance(pg_options, dict) else {}
        mesh = options.get("mesh") or rank_groups.sisters([int(r) for r in ranks])
        group._mesh = [list(g) for g in rank_groups.resolve(mesh).members]
        distributed_c10d._world.pg_group_ranks[group] = _Places(distributed_c10d._world.pg_group_ranks[group], group)
    return group


class _Places(dict[int, int]):
    """torch's table from global ranks to places in a group. Asked for a rank that differs among ranks, it gives each rank's place."""

    def __init__(self, places: dict[int, int], group: ProcessGroupXla):
        super().__init__(places)
        self._group = group

    def __getitem__(self, rank: Any) -> Any:
        values = ranks_of.values_of(rank)
        if values is None:
            return super().__getitem__(rank)
        among = self._group._groups()
        return world.current().table(lambda r: among.of(r).index(values[r]) if values[r] in among.of(r) else -1)


def refresh() -> None:
    """Let torch.distributed know the ranks of a world that has grown since `init_process_group` (a plain script that asked for tp 8 only now)."""
    default = distributed_c10d._get_default_group()
    if isinstance(default, ProcessGroupXla):
        distributed_c10d._world.pg_group_ranks[default] = _Places({r: r for r in range(world.size())}, default)


def _by_objects(name: str, ours: Callable[..., None]) -> None:
    """Replace an object collective of torch.distributed where the group is one of ours."""
    original = getattr(distributed_c10d, name)

    @functools.wraps(original)
    def collective(*args: Any, group: Any = None, **kwargs: Any) -> Any:
        chosen = group if group is not None else distributed_c10d._get_default_group()
        if isinstance(chosen, ProcessGroupXla):
            return ours(chosen, *args, **kwargs)
        return original(*args, group=group, **kwargs)

    for module in (dist, distributed_c10d):
        setattr(module, name, collective)


def _all_gather_object(group: ProcessGroupXla, object_list: list[Any], obj: Any) -> None:
    object_list[:] = object_collectives.all_gather(obj, among=group._mesh)


def _gather_object(
    group: ProcessGroupXla, obj: Any, object_gather_list: list[Any] | None = None, dst: Any = None, group_dst: Any = None
) -> None:
    found = object_collectives.all_gather(obj, among=group._mesh)
    if object_gather_list is not None:
        object_gather_list[:] = found


def _sources(group: ProcessGroupXla, src: Any, group_src: Any) -> list[int]:
    """The global rank that an object comes from, for each hosted rank. A plain one stands for its place in the group, and so in its sisters."""
    among = group._groups()
    hosted = world.current().hosted
    if group_src is None and ranks_of.values_of(src) is not None:
        return [ranks_of.per_rank(src)[rank] for rank in hosted]
    plain = int(src or 0)
    if group_src is None and len({among.of(rank) for rank in hosted}) == 1:
        return [plain] * len(hosted)
    place = among.index(plain) if group_src is None else int(group_src)
    return [among.of(rank)[place] for rank in hosted]


def _broadcast_object_list(
    group: ProcessGroupXla, object_list: list[Any], src: Any = None, device: Device = None, group_src: Any = None
) -> None:
    object_collectives.broadcast(object_list, _sources(group, src, group_src), among=group._mesh)


def _scatter_object_list(
    group: ProcessGroupXla, output: list[Any], inputs: list[Any] | None = None, src: Any = None, group_src: Any = None
) -> None:
    output[0] = object_collectives.scatter(inputs, _sources(group, src, group_src), group._mesh)


def _install() -> None:
    """Register once; a second import of this module under another name changes nothing."""
    if "XLA" in dist.Backend._plugins:
        return
    dist.Backend.register_backend("xla", _create_xla_process_group, devices=["xla"])
    dist.register_rendezvous_handler("xla", _rendezvous)
    dist.register_rendezvous_handler("pjrt", _rendezvous)
    for module in (dist, distributed_c10d):
        module.init_process_group = init_process_group  # type: ignore[attr-defined]
        module.new_group = new_xla_process_group  # type: ignore[attr-defined]
    sync_batch_norm.install()
    reducers.install()
    device_mesh.install()
    joins.install()
    _by_objects("all_gather_object", _all_gather_object)
    _by_objects("gather_object", _gather_object)
    _by_objects("broadcast_object_list", _broadcast_object_list)
    _by_objects("scatter_object_list", _scatter_object_list)


_install()
