"""The name of a program's executable: a hash of all that the executable depends on, equal in every process that would compile the same.

It is made of the fx graph, which is all that lowering reads (or of a program that `jax.export` serialized), of how the program is called, and of its
surroundings. What has no text of its own that says everything about it (a user's lowering, a tensor or an object among the arguments of an op) makes a
program nameless: `cache_environment.UnknownError`.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, SingleDeviceSharding
from torch import fx
from torch._decomp import decomposition_table

from torch_bridge import lowerings
from torch_bridge.compiler import cache_environment
from torch_bridge.compiler.cache_environment import UnknownError
from torch_bridge.compiler.program_spec import ProgramSpec
from torch_bridge.mesh import abstract_arrays, world


def parts(spec: ProgramSpec, args: Sequence[Any]) -> dict[str, str]:
    """What the executable of a program for these arguments depends on, by heading. Raises `UnknownError` if that cannot be said."""
    return {
        "graph": graph_text(spec.graph),
        "call": _call(spec),
        "arguments": _arguments(args),
        "devices": _devices(),
        **cache_environment.describe(),
    }


def of_exported(program: bytes, shapes: Any, call: str) -> dict[str, str]:
    """The same for a program that `jax.export` serialized, for `jax.ShapeDtypeStruct`s and with what else its lowering depends on. The program is all that our
    source has a part in."""
    leaves, tree = jax.tree.flatten(shapes)
    return {
        "exported": hashlib.sha256(program).hexdigest(),
        "call": call,
        "arguments": "\n".join([str(tree), *(f"{x.dtype}{x.shape} {'' if x.sharding is None else _sharding(x.sharding)}" for x in leaves)]),
        "devices": _devices(),
        **cache_environment.outside(),
    }


def digest(found: dict[str, str]) -> str:
    """One hash of all parts: 64 hex digits."""
    whole = hashlib.sha256()
    for name, text in sorted(found.items()):
        whole.update(f"{name}:{hashlib.sha256(text.encode()).hexdigest()}\n".encode())
    return whole.hexdigest()


def structure(spec: ProgramSpec) -> str:
    """A hash that programs share which do the same on other devices of as many: equal stages of a pipeline. One of its own for a program without a name."""
    try:
        mesh = "" if spec.labels is None else repr(tuple(spec.labels.mesh.shape.items()))
        return digest({"graph": graph_text(spec.graph), "call": _call(spec), "mesh": mesh})
    except UnknownError:
        return f"program {id(spec)}"


def _call(spec: ProgramSpec) -> str:
    rest = () if spec.labels is None else spec.labels.told()
    avals = [(tuple(a.shape), str(a.dtype)) for a in spec.avals]
    return cache_environment.stable([repr((spec.mode, spec.ports, spec.plan is None, avals, rest))])


# -- the graph ------------------------------------------------------------------------------------


def graph_text(graph: fx.Graph) -> str:
    """Every node with its op, arguments, shape and dtype, and where it came from. Raises `UnknownError` for what has no text."""
    place: dict[fx.Node, str] = {}
    known = _Targets()
    vals: dict[int, str] = {}
    lines = []
    for k, node in enumerate(graph.nodes):
        place[node] = f"%{k}"
        meta = node.meta
        val = meta.get("val")
        told = vals.get(id(val))
        if told is None:
            told = vals[id(val)] = _value(val)
        arguments = _text(node.args, place) + (_text(node.kwargs, place) if node.kwargs else "")
        extra = (
            f"{meta['draw']}{meta.get('draw_axes')}{sorted(meta.get('axes', ()))}{sorted(meta.get('key_axes', ()))}"
            if "draw" in meta
            else ""
        )
        lines.append(f"{node.op} {known.name(node)}{arguments} {told}{extra} {meta.get('source')}")
    return "\n".join(lines)


def _value(val: Any) -> str:
    if isinstance(val, torch.Tensor):
        return f"{val.dtype}{tuple(val.shape)}"
    return "" if val is None else type(val).__name__


class _Targets:
    """The names of what nodes call, for what is ours or torch's."""

    def __init__(self) -> None:
        self.names: dict[Any, str] = {}

    def name(self, node: fx.Node) -> str:
        target = node.target
        if isinstance(target, str):
            if node.op == "get_attr":
                raise UnknownError(f"the graph holds a tensor, {target}")
            return target
        found = self.names.get(target)
        if found is None:
            found = self.names[target] = self._of_op(target) if isinstance(target, torch._ops.OpOverload) else _of_function(target)
        return found

    def _of_op(self, op: torch._ops.OpOverload) -> str:
        lowering = lowerings.lookup(op)
        if lowering is not None:
            if not _ours(lowering.fn):
                raise UnknownError(f"{op} has a lowering of the script's own")
            return f"{op}"
        foreign = [str(other) for other, found in lowerings.registered().items() if not _ours(found.fn)]
        if foreign:
            raise UnknownError(f"{op} is made of others, and the script has lowerings of its own ({', '.join(foreign[:3])})")
        rule = decomposition_table.get(op)
        if rule is None or not getattr(rule, "__module__", "").startswith("torch."):
            raise UnknownError(f"{op} has a decomposition of the script's own")
        return f"{op}{op._schema}"


def _ours(fn: Callable[..., Any]) -> bool:
    return getattr(fn, "__module__", "").startswith("torch_bridge.")


def _of_function(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    name = getattr(target, "__qualname__", "<")
    if not _ours(target) or "<" in name:
        raise UnknownError(f"the graph calls {target!r}")
    return f"{target.__module__}.{name}"


_PLAIN = (bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _text(x: Any, place: dict[fx.Node, str]) -> str:
    """A node's argument: nodes by their place, constants with their types (1, 1.0 and True differ), floats exactly."""
    kind = type(x)
    if kind is fx.Node:
        return place[x]
    if kind in _PLAIN:
        return repr(x)
    if kind is float:
        return x.hex()
    if isinstance(x, (tuple, list)):
        inner = ",".join([_text(y, place) for y in x])
        return f"[{inner}]" if isinstance(x, list) else f"({inner})"
    if isinstance(x, dict):
        return "{" + ",".join([f"{k!r}:{_text(y, place)}" for k, y in x.items()]) + "}"
    if kind is complex:
        return f"c({x.real.hex()},{x.imag.hex()})"
    if kind is slice:
        return f"slice{_text((x.start, x.stop, x.step), place)}"
    raise UnknownError(f"an op takes a {kind.__module__}.{kind.__qualname__}")


# -- how it is called -----------------------------------------------------------------------------


def _arguments(args: Sequence[Any]) -> str:
    """Every argument's dtype, shape and place."""
    places: dict[Any, str] = {}
    lines = []
    for x in args:
        if isinstance(x, np.ndarray):
            lines.append(f"host {x.dtype}{x.shape}")
            continue
        if isinstance(x, abstract_arrays.AbstractArray):  # what a program before this one will give
            lines.append(f"passed {x.dtype}{x.shape} {_sharding(x.sharding)}")
            continue
        if not isinstance(x, jax.Array):
            raise UnknownError(f"an argument is a {type(x).__module__}.{type(x).__qualname__}")
        place = places.get(x.sharding)
        if place is None:
            place = places[x.sharding] = _sharding(x.sharding)
        lines.append(f"{x.dtype}{x.shape} {x.weak_type} {getattr(x, 'committed', True)} {place} {_order(x)}")
    return "\n".join(lines)


def _order(x: jax.Array) -> str:
    """How an array's elements lie in memory."""
    layout = getattr(getattr(x, "format", None), "layout", None)
    return f"{getattr(layout, 'major_to_minor', None)}{getattr(layout, 'tiling', None)}"


def _sharding(of: Any) -> str:
    if isinstance(of, SingleDeviceSharding):
        return f"{_ids(of.device_set)}{of.memory_kind}"
    if isinstance(of, NamedSharding):
        mesh = of.mesh
        return f"{of.spec}{of.memory_kind}{mesh.axis_names}{mesh.axis_types}{mesh.devices.shape}{_ids(mesh.devices.flat)}"
    raise UnknownError(f"an argument lies as a {type(of).__name__} says")


def _ids(devices: Any) -> str:
    """Device numbers, briefly where they count up from 0."""
    found = [d.id for d in devices]
    return f"{len(found)} devices" if found == list(range(len(found))) else str(found)


def _devices() -> str:
    client = jax.devices()[0].client
    now = world.current()
    kinds = sorted({d.device_kind for d in jax.devices()})
    return repr((client.platform, client.platform_version, kinds, jax.device_count(), now.size, now.hosted, now.axes, now.order))
