"""The collectives of `torch_xla.core.xla_model`, on `torch_bridge.collectives.functional`.

`pin_layout` is accepted everywhere and means nothing to JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_bridge.collectives import functional, object_collectives
from torch_bridge.mesh import groups as rank_groups
from torch_bridge.mesh import processes, world
from torch_bridge.mesh.groups import GroupLike
from torch_bridge.mesh.spmd_mode import MODE
from torch_bridge.recorder import prefetch
from torch_bridge.runtime import steps
from torch_bridge.script import rank_payloads

REDUCE_SUM = "sum"
REDUCE_MUL = "mul"
REDUCE_AND = "and"
REDUCE_OR = "or"
REDUCE_MIN = "min"
REDUCE_MAX = "max"


def _block(t: object) -> torch.Tensor | None:
    """The tensor, if it is one of a region of manual sharding."""
    if not MODE.regions or not isinstance(t, torch.Tensor):
        return None
    plain: torch.Tensor = getattr(t, "global_tensor", t)
    return plain if _regions().inside(plain) else None


def _regions() -> Any:
    from torch_bridge.recorder import manual_regions

    return manual_regions


def all_reduce(reduce_type: str, inputs: Any, scale: float = 1.0, groups: GroupLike = None, pin_layout: bool = True) -> Any:
    """`xm.all_reduce`: a tensor gives a new tensor; a list is reduced in place and returned.

    The result is multiplied by `scale`, also in a world of one (torch_xla forgets it there). Raises ValueError for gradients of shards of
    `XlaFullyShardedDataParallel`, of which the group's ranks have different parts. In a region of manual sharding (`xs.enable_manual_sharding`) groups are of
    device numbers, and gradients go through.
    """
    if (block := _block(inputs)) is not None:
        return _regions().all_reduce(reduce_type, block, scale, groups)
    _refuse_shards("xm.all_reduce", inputs, groups)
    return functional.all_reduce(reduce_type, inputs, scale, groups)


def all_gather(value: Any, dim: int = 0, groups: GroupLike = None, output: Any = None, pin_layout: bool = True) -> Any:
    """`xm.all_gather`: the group's tensors side by side along `dim`; written into `output` and returned if given.

    Also for a list of tensors.
    """
    if output is None and (block := _block(value)) is not None:
        return _regions().all_gather(block, dim, groups)
    return functional.all_gather(value, dim, groups, output)


def all_gather_bucketized(
    input_list: Sequence[torch.Tensor],
    dim: int = 0,
    groups: GroupLike = None,
    output: Any = None,
    pin_layout: bool = False,
    bucket_cap_mb: float = 160,
) -> Any:
    """`xm.all_gather_bucketized`: `all_gather` of a list. Buckets are accepted and not needed: the compiler combines collectives."""
    _check_bucket(bucket_cap_mb)
    return functional.all_gather(list(input_list), dim, groups, output)


def reduce_scatter(
    reduce_type: str,
    input: Any,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: GroupLike = None,
    output: Any = None,
    pin_layout: bool = True,
) -> Any:
    """`xm.reduce_scatter`: reduce, multiply by `scale` and keep this rank's shard; written into `output` and returned if given."""
    if output is None and (block := _block(input)) is not None:
        return _regions().reduce_scatter(reduce_type, block, scale, scatter_dim, shard_count, groups)
    return functional.reduce_scatter(reduce_type, input, scale, scatter_dim, shard_count, groups, output)


def reduce_scatter_bucketized(
    reduce_type: str,
    input_list: Any,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: GroupLike = None,
    output: Any = None,
    pin_layout: bool = False,
    bucket_cap_mb: float = 160,
) -> Any:
    """`xm.reduce_scatter_bucketized`: `reduce_scatter` of a list."""
    _check_bucket(bucket_cap_mb)
    return functional.reduce_scatter(reduce_type, input_list, scale, scatter_dim, shard_count, groups, output)


def _check_bucket(bucket_cap_mb: float) -> None:
    if bucket_cap_mb <= 0:
        raise ValueError(f"bucket_cap_mb must be positive (MiB), got {bucket_cap_mb}")


def all_to_all(
    value: torch.Tensor, split_dimension: int, concat_dimension: int, split_count: int, groups: GroupLike = None, pin_layout: bool = True
) -> torch.Tensor:
    """`xm.all_to_all`."""
    return functional.all_to_all(value, split_dimension, concat_dimension, split_count, groups)


def collective_permute(value: Any, pairs: Sequence[Sequence[int]]) -> Any:
    """`xm.collective_permute`: a rank that is no target gets zeros."""
    return functional.permute(value, pairs)


def collective_broadcast(tensors: list[torch.Tensor], root_ordinal: int = 0, groups: Any = None, pin_layout: bool = True) -> None:
    """`xm.collective_broadcast`: in place."""
    if groups and all(type(g) is int for g in groups):
        groups = [groups]
    functional.broadcast(tensors, root_ordinal, groups)


def send(value: torch.Tensor, channel_id: int) -> torch.Tensor:
    """`xm.send`: not possible, see `_no_peer`."""
    raise _no_peer(f"xm.send(channel_id={channel_id})", "send to")


def recv(output: torch.Tensor, channel_id: int) -> torch.Tensor:
    """`xm.recv`: not possible, see `_no_peer`."""
    raise _no_peer(f"xm.recv(channel_id={channel_id})", "receive from")


def _no_peer(call: str, what: str) -> Exception:
    """All ranks run one program, so none can send alone."""
    if world.size() == 1:
        return ValueError(f"{call}: a world of 1 has no other rank to {what}")
    return NotImplementedError(
        f"{call}: point-to-point transfers have no meaning in a program that all ranks run together; use "
        "xm.collective_permute(tensor, [[source, target], ...]), which every rank calls"
    )


def _fetch_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """`xm._fetch_gradients`: the gradients that are to be averaged over ranks: of all of an optimizer's parameters but shards of `XlaFullyShardedDataParallel`,
    which has done it. accelerate's optimizer, and so transformers' Trainer, averages them."""
    from torch_bridge.fsdp import state as fsdp_state

    return fsdp_state.unshared(p for group in optimizer.param_groups for p in group["params"])


def _refuse_shards(what: str, grads: Any, groups: GroupLike) -> None:
    from torch_bridge.fsdp import state as fsdp_state

    given = [grads] if isinstance(grads, torch.Tensor) else grads
    if isinstance(given, (list, tuple)):
        fsdp_state.check_not_summed(what, given, groups)


def reduce_gradients(optimizer: torch.optim.Optimizer, groups: GroupLike = None, pin_layout: bool = True) -> None:
    """`xm.reduce_gradients`: average the gradients over the group, in place. Raises ValueError for those of shards that the group's ranks have parts of."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    _refuse_shards("xm.optimizer_step and xm.reduce_gradients", [p.grad for p in params if p.grad is not None], groups)
    count = rank_groups.resolve(groups).size
    functional.all_reduce(REDUCE_SUM, _fetch_gradients(optimizer), 1.0 / count, groups)


def all_reduce_bucketized_gradients(
    gradients: list[torch.Tensor], scale: float, groups: GroupLike, pin_layout: bool = True, bucket_cap_mb: float = 0
) -> None:
    """`xm.all_reduce_bucketized_gradients`: all-reduce gradients in place."""
    _refuse_shards("xm.all_reduce_bucketized_gradients", gradients, groups)
    functional.all_reduce(REDUCE_SUM, gradients, scale, groups)


def broadcast_master_param(model: torch.nn.Module) -> None:
    """`xm.broadcast_master_param`: give every rank rank 0's parameters and buffers."""
    functional.broadcast([*model.parameters(), *model.buffers()])
    steps.mark()


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """`xm.rendezvous`: wait until every worker is here; returns everyone's payload by rank. Unlike torch_xla it does not end the step.

    replicas: ranks that meet, all by default; only some in a process that hosts them all. A process that hosts several ranks gives its payload for all of
    them, and warns if that is made of a rank's number.
    """
    if len(world.current().hosted) > 1:
        rank_payloads.note(1, "payload")
    return _meet(tag, payload, replicas)


def _meet(tag: str, payload: bytes, replicas: Sequence[int]) -> list[bytes]:
    if not isinstance(payload, bytes):
        raise TypeError(f"`payload` must be bytes, not {type(payload)}")
    if replicas and sorted(replicas) != list(range(world.size())):
        if world.process_count() > 1 or not set(replicas) <= set(range(world.size())):
            raise ValueError(
                f"rendezvous {tag!r}: between processes only all {world.size()} ranks can meet, and in one process some of them; got replicas={list(replicas)}"
            )
        return [payload for _ in replicas]
    parts = processes.exchange(f"rendezvous {tag}", payload)
    return [part for part in parts for _ in range(world.size() // len(parts))]


def xla_rendezvous(payload: bytes = b"", ordinals: Sequence[int] | None = None, tag: str | None = None) -> list[bytes]:
    """`xm.xla_rendezvous`: see `rendezvous`."""
    if len(world.current().hosted) > 1:
        rank_payloads.note(0, "payload")
    return _meet(tag or "", payload, ordinals or ())


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
    """`xm.mesh_reduce`: gather every worker's data (pickled, tensors on the CPU) and reduce the list.

    Tensors on xla, ranks and numbers read from tensors with `.item()` count as each worker's own.
    """
    return reduce_fn(object_collectives.all_gather(data, f"mesh_reduce {tag}"))


def do_on_ordinals(target: Callable[..., Any], data: Any = (), ordinals: Any = (0,)) -> Any:
    """`xm.do_on_ordinals`: call `target(*data)`, tensors on the CPU, on some ranks; None on the others."""
    chosen = (ordinals,) if isinstance(ordinals, int) else ordinals
    return target(*prefetch.to_host(data)) if world.rank() in chosen else None
