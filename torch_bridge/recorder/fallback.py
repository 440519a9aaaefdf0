"""Ops without a lowering: torch's own decomposition if there is one, else the CPU, counted and warned about once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from torch_bridge import metrics, source
from torch_bridge.compiler import interpret
from torch_bridge.errors import UnsupportedOpError
from torch_bridge.mesh import rank_numbers, sharding, world
from torch_bridge.precision.precision_mode import Mode
from torch_bridge.recorder import captured_values, subgraph
from torch_bridge.recorder.copies import upload
from torch_bridge.recorder.downloads import download, each_ranks
from torch_bridge.recorder.schema import info
from torch_bridge.recorder.tensor import XLATensor, read
from torch_bridge.recorder.uploads import from_ranks
from torch_bridge.recorder.varying import varying
from torch_bridge.runtime.session import STATE

aten = torch.ops.aten

DATA_DEPENDENT = {
    "nonzero", "nonzero_numpy", "masked_select", "unique_consecutive", "_unique", "_unique2", "unique_dim", "bincount",
    "repeat_interleave", "index", "equal", "histogram", "_histogramdd_bin_edges", "_linalg_check_errors",
}  # fmt: skip
"""Ops whose result shape (or error) depends on values: running them on the host is what they need, not a missing lowering."""

_WARNED: set[Any] = set()


def is_data_dependent(op: torch._ops.OpOverload) -> bool:
    """True if the op's result shape depends on values."""
    return op._schema.name.removeprefix("aten::") in DATA_DEPENDENT


def has_decomposition(op: torch._ops.OpOverload) -> bool:
    """True if torch can express the op through others."""
    return op in decomposition_table


def lower_by_decomposition(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], key: Callable[[], Any] | None, mode: Mode
) -> Any:
    """Evaluate torch's decomposition of `op` on JAX values, by recording it in a segment of its own (`interpret.decompose`)."""
    return subgraph.inline(decomposition_table[op], args, kwargs, key, mode)


def on_host(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on the CPU: copy its xla tensors to the host, run eager torch, copy results (and mutations) back.

    Where ranks hold different values it runs once for each distinct rank: its own inputs give its own results.
    """
    _announce(func, args, kwargs)
    tensors = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, XLATensor)}
    axes = _varied(tensors.values())
    calls = _call_for_each(func, args, kwargs, tensors, axes)
    first = next(iter(calls.values()))

    def joined(of: Callable[[_HostCall], torch.Tensor]) -> XLATensor:
        """One xla tensor of each rank's CPU tensor."""
        sizes = {tuple(of(call).shape) for call in calls.values()}
        if len(sizes) > 1:
            raise RuntimeError(
                f"{func} gives tensors of different shapes {sorted(sizes)} on different ranks (at {source.user_line()}): all ranks "
                "compute together and need one shape. Use a mask (torch.where) instead, or torchrun with one process per rank."
            )
        return from_ranks(lambda rank: of(calls[rank]), axes) if axes else upload(of(first))

    def result(k: int) -> Any:
        found = first.results[k]
        if not isinstance(found, torch.Tensor):
            return rank_numbers.item(tuple(call.results[k] for call in calls.values()))
        written = first.argument(found)
        if written is not None:
            return tensors[written]
        made = joined(lambda call: call.results[k])
        made._storage.describe(origin=f"{func} at {source.short_line()}")
        return made

    for t in _mutated(func, args, kwargs):
        new = joined(lambda call: call.tensors[id(t)])  # noqa: B023  # called at once
        if new._layout.size != t._layout.size:
            aten.resize_.default(t, new._layout.size)
        STATE.session.current.write_view(t._storage, t._layout, read(new))
    return tree_unflatten([result(k) for k in range(len(first.results))], first.structure)


def _announce(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count a run on the CPU, and warn of the first of an op that should have a lowering. UnsupportedOpError while a module is captured."""
    name = func._schema.name.removeprefix("aten::")
    if STATE.session.current.capture:
        if all(captured_values.known(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)):
            return
        if is_data_dependent(func):
            raise UnsupportedOpError(
                f"{func} gives a result whose shape follows from values, and torch_bridge.capture records a module without values, for all (at "
                f"{source.user_line()}). Keep the shape: torch.where(mask, x, 0) in place of x[mask], torch.topk of a fixed number, or do it outside."
            )
        raise UnsupportedOpError(
            f"{func} has no JAX lowering and cannot run on the CPU while torch_bridge.capture records a module "
            f"(at {source.user_line()}). Register one: @torch_bridge.lowerings.lowering(torch.ops.{func})."
        )
    if is_data_dependent(func):
        metrics.count(f"host::{name}")
    else:
        metrics.count(f"aten::{name}")
        _warn(func, args, kwargs)


class _HostCall:
    """An op run on the CPU, on the values of one rank.

    tensors: the CPU tensors, by id of the xla tensor each stands for; the op may have written to them. results, structure: what the op gave, flattened.
    """

    def __init__(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: dict[int, torch.Tensor]):
        def to_host(x: object) -> Any:
            if isinstance(x, XLATensor):
                return tensors[id(x)]
            return torch.device("cpu") if isinstance(x, torch.device) else x

        cpu_args, cpu_kwargs = tree_map(to_host, (args, kwargs))
        with torch.no_grad():
            self.results, self.structure = tree_flatten(func(*cpu_args, **cpu_kwargs))
        self.tensors = tensors

    def argument(self, result: torch.Tensor) -> int | None:
        """The id of the xla tensor that a result stands for, if the op gave back an argument."""
        return next((key for key, t in self.tensors.items() if t is result), None)


def _varied(tensors: Iterable[XLATensor]) -> tuple[str, ...]:
    """The mesh axes along which some of them differ."""
    if not sharding.active():
        return ()
    return sharding.ordered(axis for t in tensors for axis in varying(t).axes)


def _call_for_each(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: dict[int, XLATensor], axes: tuple[str, ...]
) -> dict[int, _HostCall]:
    """The call of each hosted rank; ranks at the same place along `axes` share one."""
    hosted = world.current().hosted
    if not axes:
        values_of = {key: download(t) for key, t in tensors.items()}
        for t in _mutated(func, args, kwargs):
            values_of[id(t)] = values_of[id(t)].clone()  # in memory of torch's own, which the op may resize
        return dict.fromkeys(hosted, _HostCall(func, args, kwargs, values_of))
    values = {key: each_ranks(t) for key, t in tensors.items()}
    coordinates = [world.coordinates(a) for a in axes]
    calls: dict[tuple[int, ...], _HostCall] = {}
    for k, rank in enumerate(hosted):
        place = tuple(c[rank] for c in coordinates)
        if place not in calls:
            calls[place] = _HostCall(func, args, kwargs, {key: own[k].clone() for key, own in values.items()})
    return {rank: calls[tuple(c[rank] for c in coordinates)] for rank in hosted}


def _mutated(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[XLATensor]:
    """The xla tensors that the op writes to."""
    call_info = info(func)
    given = [args[i] if i < len(args) else kwargs.get(call_info.names[i]) for i in call_info.mutated]
    return [t for t in tree_leaves(given) if isinstance(t, XLATensor)]


def _warn(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if func in _WARNED:
        return
    _WARNED.add(func)
    shapes: list[str] = []
    tree_map(lambda x: shapes.append(f"{x.dtype}{list(x.shape)}") if isinstance(x, torch.Tensor) else None, (args, kwargs))
    warnings.warn(
        f"{func} has no JAX lowering: it runs on the CPU, which stops and splits the graph (called with {', '.join(shapes)} at {source.user_line()}). "
        f"Counted as 'aten::{func._schema.name.removeprefix('aten::')}' in torch_xla.debug.metrics. "
        "To lower it, register a JAX function: @torch_bridge.lowerings.lowering(torch.ops." + str(func) + ").",
        stacklevel=2,
    )


interpret.decompose_with(lower_by_decomposition)
