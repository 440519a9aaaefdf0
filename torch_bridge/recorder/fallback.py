"""Ops without a lowering: torch's own decomposition if there is one, else the CPU, counted and warned about once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from torch_bridge import metrics, source
from torch_bridge.compiler import interpret
from torch_bridge.errors import UnsupportedOpError
from torch_bridge.mesh import rank_numbers, sharding, world
from torch_bridge.recorder import sharded, subgraph
from torch_bridge.recorder.copies import upload
from torch_bridge.recorder.downloads import download
from torch_bridge.recorder.schema import info
from torch_bridge.recorder.tensor import XLATensor, read
from torch_bridge.runtime.pending import STATE

aten = torch.ops.aten

DATA_DEPENDENT = {
    "nonzero", "nonzero_numpy", "masked_select", "unique_consecutive", "_unique", "_unique2", "unique_dim", "bincount",
    "repeat_interleave", "index", "equal", "histogram", "_histogramdd_bin_edges", "_linalg_check_errors",
}  # fmt: skip
"""Ops whose result shape (or error) depends on values: running them on the host is what they need, not a missing lowering."""

_WARNED: set[Any] = set()


def is_data_dependent(op: Any) -> bool:
    """True if the op's result shape depends on values."""
    return op._schema.name.removeprefix("aten::") in DATA_DEPENDENT


def has_decomposition(op: Any) -> bool:
    """True if torch can express the op through others."""
    return op in decomposition_table


def lower_by_decomposition(op: Any, args: Any, kwargs: Any, key: Callable[[], Any] | None) -> Any:
    """Evaluate torch's decomposition of `op` on JAX values, by recording it in a segment of its own (`interpret.decompose`)."""
    return subgraph.inline(decomposition_table[op], args, kwargs, key)


def on_host(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op on the CPU: copy its xla tensors to the host, run eager torch, copy results (and mutations) back."""
    name = func._schema.name.removeprefix("aten::")
    if STATE.current.capture:
        raise UnsupportedOpError(
            f"{func} has no JAX lowering and cannot run on the CPU while torch_bridge.capture records a module "
            f"(at {source.user_line()}). Register one: @torch_bridge.lowerings.lowering(torch.ops.{func})."
        )
    if is_data_dependent(func):
        metrics.count(f"host::{name}")
    else:
        metrics.count(f"aten::{name}")
        _warn(func, args, kwargs)
    axes = _varied(args, kwargs)
    if axes:
        return _on_host_of_each(func, args, kwargs, axes)
    hosts: dict[int, tuple[XLATensor, torch.Tensor, torch.Tensor]] = {}

    def to_host(x: Any) -> Any:
        if isinstance(x, XLATensor):
            if id(x) not in hosts:
                host = download(x)
                hosts[id(x)] = (x, host, host.clone())
            return hosts[id(x)][1]
        return torch.device("cpu") if isinstance(x, torch.device) else x

    cpu_args, cpu_kwargs = tree_map(to_host, (args, kwargs))
    with torch.no_grad():
        out = func(*cpu_args, **cpu_kwargs)
    back = {id(host): x for x, host, _ in hosts.values()}
    _write_back(func, args, kwargs, hosts)

    def to_xla(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) in back:
            return back[id(x)]
        made = upload(x)
        made._storage.describe(origin=f"{func} at {source.short_line()}")
        return made

    return tree_map(to_xla, out)


def _varied(args: Any, kwargs: Any) -> tuple[str, ...]:
    """The mesh axes along which the xla tensors among the arguments differ."""
    if not sharding.active():
        return ()
    found = [sharded.varying(x).axes for x in tree_leaves((args, kwargs)) if isinstance(x, XLATensor)]
    return sharding.ordered(a for axes in found for a in axes)


def _on_host_of_each(func: Any, args: Any, kwargs: Any, axes: tuple[str, ...]) -> Any:
    """Run an op on the CPU once for each distinct rank: its own inputs give its own results."""
    tensors = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, XLATensor)}
    shards = {key: sharded.shards(x) for key, x in tensors.items()}
    hosted = world.current().hosted
    places = [world.coordinates(a) for a in axes]
    table = [tuple(p[r] for p in places) for r in range(world.size())]
    results: dict[Any, tuple[list[Any], dict[int, torch.Tensor]]] = {}
    spec = None
    for at, rank in enumerate(hosted):
        if table[rank] in results:
            continue
        own = {key: s[at].clone() for key, s in shards.items()}

        def to_host(x: Any, own: dict[int, torch.Tensor] = own) -> Any:
            return own[id(x)] if isinstance(x, XLATensor) else torch.device("cpu") if isinstance(x, torch.device) else x

        cpu_args, cpu_kwargs = tree_map(to_host, (args, kwargs))
        with torch.no_grad():
            leaves, spec = tree_flatten(func(*cpu_args, **cpu_kwargs))
        results[table[rank]] = leaves, own
    assert spec is not None

    def gather(k: int) -> Any:
        found = [results[table[r]][0][k] for r in hosted]
        if not isinstance(found[0], torch.Tensor):
            return rank_numbers.item(tuple(found))
        if len({tuple(t.shape) for t in found}) > 1:
            raise RuntimeError(
                f"{func} gives tensors of different shapes {sorted({tuple(t.shape) for t in found})} on different ranks (at {source.user_line()}): all ranks "
                "compute together and need one shape. Use a mask (torch.where) instead, or torchrun with one process per rank."
            )
        same = [key for key, t in results[table[hosted[0]]][1].items() if t is found[0]]
        return tensors[same[0]] if same else sharded.from_ranks(lambda r: results[table[r]][0][k], axes)

    call_info = info(func)
    for i in call_info.mutated:
        value = args[i] if i < len(args) else kwargs.get(call_info.names[i])
        for t in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(t, XLATensor):
                new = sharded.from_ranks(lambda r: results[table[r]][1][id(t)], axes)  # noqa: B023  # called at once
                STATE.current.write_view(t._storage, t._layout, read(new))
    return tree_unflatten([gather(k) for k in range(len(results[table[hosted[0]]][0]))], spec)


def _write_back(func: Any, args: Any, kwargs: Any, hosts: dict[int, Any]) -> None:
    call_info = info(func)
    for i in call_info.mutated:
        value = args[i] if i < len(args) else kwargs.get(call_info.names[i])
        for t in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(t, XLATensor):
                host = hosts[id(t)][1]
                if tuple(host.shape) != t._layout.size:
                    aten.resize_.default(t, host.shape)
                STATE.current.write_view(t._storage, t._layout, read(upload(host)))


def _warn(func: Any, args: Any, kwargs: Any) -> None:
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
