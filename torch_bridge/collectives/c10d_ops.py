"""torch's functional collectives (`torch.distributed._functional_collectives`, `torch.ops._c10d_functional`) on xla tensors: recorded as ours are.

Groups of other backends, such as gloo, call `torch.ops.c10d` instead. Their values are CPU tensors: of their ops a barrier alone gets here with reason.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # it defines some of the ops
from torch.distributed import distributed_c10d

from torch_bridge.collectives import functional
from torch_bridge.collectives.process_group import ProcessGroupXla, check_equal_parts
from torch_bridge.recorder.dispatch import special

ops = torch.ops._c10d_functional

Op = torch._ops.OpOverload
Args = tuple[Any, ...]
Group = str | dist.ProcessGroup
"""As ops get it: torch's name of it, or itself."""


def _overloads(name: str) -> list[Any]:
    """The op, where this release of torch has it."""
    return [getattr(ops, name).default] if hasattr(ops, name) else []


_KINDS = {"sum": "sum", "avg": "sum", "product": "mul", "min": "min", "max": "max", "band": "and", "bor": "or"}


def _group(named: Group) -> ProcessGroupXla:
    """The group that an op names: by torch's name ("": all ranks, as torch_xla does), or itself."""
    if isinstance(named, str):
        named = distributed_c10d._resolve_process_group(named) if named else distributed_c10d._get_default_group()  # type: ignore[arg-type]
    if not isinstance(named, ProcessGroupXla):
        raise _not_ours(named)
    return named


def _not_ours(group: dist.ProcessGroup) -> ValueError:
    return ValueError(
        f'a collective of xla tensors needs a group of backend "xla", got one of "{group.name()}": '
        'init_process_group("xla"), or give this group CPU tensors'
    )


def _reduction(name: str, group: ProcessGroupXla) -> tuple[str, float]:
    """The kind of a reduction, and what to multiply its result by."""
    kind = _KINDS.get(name.lower())
    if kind is None:
        raise ValueError(f"the xla backend has no reduction {name!r}; use {', '.join(_KINDS)}")
    return kind, 1.0 / group.size() if name.lower() == "avg" else 1.0


def _all_reduced(x: torch.Tensor, name: str, group: Group) -> torch.Tensor:
    among = _group(group)
    kind, scale = _reduction(name, among)
    return functional.all_reduce(kind, x, scale, among._mesh)


def _gathered(x: torch.Tensor, group: Group) -> torch.Tensor:
    return functional.all_gather(x if x.dim() else x.reshape(1), 0, _group(group)._mesh)


def _scattered(x: torch.Tensor, name: str, group: Group) -> torch.Tensor:
    among = _group(group)
    kind, scale = _reduction(name, among)
    return functional.reduce_scatter(kind, x, scale, 0, among.size(), among._mesh)


def _broadcast(x: torch.Tensor, src: int, group: Group) -> torch.Tensor:
    among = _group(group)._groups()
    if among.size > 1:
        functional.broadcast_from([x], src, among)
    return x


@special(ops.all_reduce.default)
def all_reduce(func: Op, args: Args, kwargs: dict[str, Any]) -> torch.Tensor:
    return _all_reduced(*args, **kwargs)


@special(ops.all_reduce_.default)
def all_reduce_(func: Op, args: Args, kwargs: dict[str, Any]) -> torch.Tensor:
    return args[0].copy_(_all_reduced(*args, **kwargs))


@special(ops.all_reduce_coalesced.default)
def all_reduce_coalesced(func: Op, args: Args, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [_all_reduced(x, *args[1:], **kwargs) for x in args[0]]


@special(ops.all_reduce_coalesced_.default)
def all_reduce_coalesced_(func: Op, args: Args, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [x.copy_(_all_reduced(x, *args[1:], **kwargs)) for x in args[0]]


@special(ops.all_gather_into_tensor.default, ops.all_gather_into_tensor_out.default)
def all_gather(func: Op, args: Args, kwargs: dict[str, Any]) -> torch.Tensor:
    return _written(_gathered(args[0], args[2]), kwargs)


@special(ops.all_gather_into_tensor_coalesced.default)
def all_gather_coalesced(func: Op, args: Args, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [_gathered(x, args[2]) for x in args[0]]


@special(ops.reduce_scatter_tensor.default, ops.reduce_scatter_tensor_out.default)
def reduce_scatter(func: Op, args: Args, kwargs: dict[str, Any]) -> torch.Tensor:
    return _written(_scattered(args[0], args[1], args[3]), kwargs)


@special(ops.reduce_scatter_tensor_coalesced.default)
def reduce_scatter_coalesced(func: Op, args: Args, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [_scattered(x, args[1], args[3]) for x in args[0]]


@special(ops.all_to_all_single.default)
def all_to_all(func: Op, args: Args, kwargs: dict[str, Any]) -> torch.Tensor:
    x, outputs, inputs, group = args
    among = _group(group)
    check_equal_parts(outputs, inputs)
    return functional.all_to_all(x, 0, 0, among.size(), among._mesh)


@special(ops.broadcast.default)
def broadcast(func: Op, args: Args, kwargs: dict[str, Any]) -> torch.Tensor:
    return _broadcast(args[0].clone(), *args[1:])


@special(ops.broadcast_.default)
def broadcast_(func: Op, args: Args, kwargs: dict[str, Any]) -> torch.Tensor:
    return _broadcast(*args)


@special(ops.wait_tensor.default, *_overloads("_wrap_tensor_autograd"))
def wait(func: Op, args: Args, kwargs: dict[str, Any]) -> torch.Tensor:
    """A recorded collective needs no waiting: the graph holds its order."""
    return args[0]


@special(*_overloads("isend"), *_overloads("irecv"))
def point_to_point(func: Op, args: Args, kwargs: dict[str, Any]) -> torch.Tensor:
    among = _group(args[-1])
    return among._no_peer("send to" if "isend" in str(func) else "recv from", args[1])


def _of_other_groups() -> list[Any]:
    """The ops by which torch's own groups (gloo) run collectives."""
    names = [name.removeprefix("c10d::").partition(".") for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")]
    found = [getattr(getattr(torch.ops.c10d, op), overload or "default") for op, _, overload in names]
    return [op for op in found if any("ProcessGroup" in str(argument.type) for argument in op._schema.arguments)]


_BARRIERS = [torch.ops.c10d.barrier.default, torch.ops.c10d.monitored_barrier_.default]


@special(*_BARRIERS)
def barrier_of_others(func: Op, args: Args, kwargs: dict[str, Any]) -> Any:
    """A barrier of a CPU group. torch names it by a tensor on the accelerator (`barrier(device_ids=[...])`), whose values nobody reads."""
    return func(torch.empty(1), *args[1:], **kwargs)


@special(*[op for op in _of_other_groups() if op not in _BARRIERS])
def collective_of_others(func: Op, args: Args, kwargs: dict[str, Any]) -> Any:
    raise _not_ours(next(dist.ProcessGroup.unbox(value) for value in args if isinstance(value, torch.ScriptObject)))


def _written(value: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """The value, in `out` if there is one."""
    out = kwargs.get("out")
    return value if out is None else out.copy_(value)
