"""Programs over all devices at once, with sharding annotations: what `xr.use_spmd` switches on.

There are no ranks then. The script runs once for all devices of the job, a tensor has its global shape, and its array lies on a mesh of all devices: as
annotated, or replicated. XLA divides the work (GSPMD) and puts the collectives in. Programs of ranks (`mesh.sharding`) and annotated ones exclude each other.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torch_bridge import _compat
from torch_bridge.mesh import abstract_arrays, processes, world
from torch_bridge.mesh.spmd_mode import MODE, active, devices

__all__ = [
    "active",
    "adopt",
    "axes_of",
    "devices",
    "divided",
    "fitted",
    "fitting",
    "from_parts",
    "in_order",
    "lies",
    "mesh",
    "mesh_of",
    "named",
    "parse",
    "place_whole",
    "placed_whole",
    "put",
    "refined",
    "replicated",
    "stop",
    "text",
    "use",
    "whole",
]

logger = logging.getLogger("nxd_jax")

Spec = tuple[tuple[str, ...] | None, ...]
"""By dim of a tensor, the mesh axes that it is divided over; None: it is not."""


def use() -> None:
    """Switch annotations on (`xr.use_spmd`): one script for all devices of the job. Does nothing the second time.

    The devices are those of the world of ranks, if one was asked for (`nxd-run`, NEURON_RT_NUM_CORES, torchrun), else all that JAX has. Tensors that are on
    xla already are replicated when they are used next. Raises RuntimeError if ranks have been laid out on several mesh axes before.
    """
    if active():
        return
    now = world.current()
    if len(now.axes) > 1 and sum(n > 1 for n in now.axes.values()) > 1:
        raise RuntimeError(
            f"xr.use_spmd(): this process runs a world of ranks laid out as {now.axes} (initialize_model_parallel). A script either has ranks "
            "(neuronx_distributed, torch.distributed) or annotations over all devices: call xr.use_spmd() alone, in a script of its own"
        )
    chosen = _devices(now)
    for_ranks = now.size
    whole = world.World(1, fixed=True)
    whole.process = (world.process_index(), world.process_count())
    world.configure(whole)
    MODE.devices = tuple(chosen)
    MODE.mesh, MODE.chosen = Mesh(np.array(chosen), ("devices",)), False
    kind = "virtual CPU devices" if chosen[0].platform == "cpu" else f"{chosen[0].device_kind} devices"
    if now.first_here:
        note = "" if len(chosen) > 1 or for_ranks > 1 else f" (for more: {world.KNOB})"
        among = f" of {now.processes} processes" if now.processes > 1 else ""
        sys.stderr.write(f"nxd_jax: one program over {len(chosen)} {kind}{among}, with sharding annotations{note}\n")


def stop() -> None:
    """Back to ranks (for tests): the world is decided anew."""
    MODE.stopping = True
    try:
        world.configure(None)  # what is recorded runs first
    finally:
        MODE.devices, MODE.mesh, MODE.chosen, MODE.stopping, MODE.regions = (), None, False, False, False
    for cached in (mesh_of, _reordered, _same_order, _moving):
        cached.cache_clear()


def _refuse_ranks() -> None:
    """Before ranks are laid out anew."""
    if active() and not MODE.stopping:
        raise RuntimeError(
            "this script called xr.use_spmd(): it is one program over all devices, without ranks. neuronx_distributed (initialize_model_parallel, "
            "NxDParallelState) and other worlds of ranks need a script of their own; here, divide tensors with xs.mark_sharding"
        )


world.before_change(_refuse_ranks)


def _devices(now: world.World) -> Sequence[Any]:
    if now.processes > 1:
        processes.start(now)
        found = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
        if len(found) != now.size:
            raise RuntimeError(
                f"a job of {now.processes} processes and {now.size} ranks has {len(found)} devices: start JAX nowhere before xr.use_spmd()"
            )
        return found
    if now.size > 1 or now.fixed:
        if abstract_arrays.active() and not (_compat.jax_started() and len(jax.devices()) >= now.size):
            return abstract_arrays.devices(now.size)
        if not _compat.jax_started():
            _compat.provision_cpu_devices(now.size)
        found = jax.devices()
        if len(found) < now.size and found[0].platform != "cpu":
            found = jax.devices("cpu")
        if len(found) < now.size:
            raise RuntimeError(
                f"{now.size} devices were asked for, and JAX started with {len(found)}, which cannot change any more: call xr.use_spmd() before the first "
                "tensor goes to xla"
            )
        return found[: now.size]
    return jax.devices()


def mesh() -> Mesh:
    """The mesh that values without an annotation are replicated over."""
    assert MODE.mesh is not None, "annotations are off"
    return MODE.mesh


# -- shardings ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def mesh_of(ids: tuple[int, ...], shape: tuple[int, ...], axes: tuple[str, ...]) -> Mesh:
    """A mesh of the job's devices, by their numbers in row-major order."""
    return Mesh(np.array([MODE.devices[k] for k in ids]).reshape(shape), axes)


def in_order(sharding: NamedSharding) -> NamedSharding:
    """The same sharding for programs, which run on one order of devices: that of the first mesh. Blocks of a later mesh that has another order lie on other
    devices than it says; values are the same."""
    of: Any = sharding.mesh
    if not MODE.chosen:
        MODE.mesh, MODE.chosen = of, True
    if _same_order(of, mesh()):
        return sharding
    return NamedSharding(_reordered(of, mesh()), sharding.spec)


@functools.lru_cache(maxsize=64)
def _reordered(of: Mesh, like: Mesh) -> Mesh:
    logger.warning(
        "a mesh has its devices in another order than the first mesh of this script; a program runs on one order, that of the first: blocks lie on other "
        "devices than this mesh says, and values are the same. Give all meshes the same device_ids"
    )
    return Mesh(np.array(like.devices.flat).reshape(of.devices.shape), of.axis_names)


def refined(sharding: NamedSharding, meshes: Sequence[Mesh]) -> NamedSharding:
    """The same sharding on a mesh whose axes, together, are the axes of each of several meshes, which have one order of devices; if their sizes allow it."""
    cuts = {1} | {stride * size for of in meshes for _, stride, size in _strides(of)}
    ascending = sorted(cuts)
    if len(cuts) == 1 or any(b % a for a, b in itertools.pairwise(ascending)):
        return sharding
    for a, b in itertools.pairwise(ascending):
        while a < b:
            a *= next(k for k in range(2, b + 1) if b // a % k == 0)
            cuts.add(a)
    ascending = sorted(cuts)
    places = list(itertools.pairwise(ascending))[::-1]
    names = {a: f"part{k}" for k, (a, _) in enumerate(places)}
    fine = Mesh(sharding.mesh.devices.reshape([b // a for a, b in places]), tuple(names.values()))
    of = {name: tuple(names[a] for a, _ in places if stride <= a < stride * size) for name, stride, size in _strides(sharding.mesh)}
    parts = [part if isinstance(part, tuple) else (part,) for part in sharding.spec]
    return named(fine, tuple(tuple(a for axis in part if axis is not None for a in of[axis]) or None for part in parts))


def _strides(of: Any) -> list[tuple[str, int, int]]:
    """Each axis of a mesh, how far apart in the order of devices its neighbours are, and its size."""
    shape = of.devices.shape
    return [(name, math.prod(shape[k + 1 :]), shape[k]) for k, name in enumerate(of.axis_names)]


def text(sharding: NamedSharding) -> str:
    """A sharding as an argument of a recorded op: `parse` reads it."""
    of = sharding.mesh
    number = {d: k for k, d in enumerate(MODE.devices)}
    ids = [number[d] for d in of.devices.flat]
    told = {
        "axes": list(of.axis_names),
        "shape": list(of.devices.shape),
        "devices": None if ids == list(range(len(ids))) else ids,
        "spec": [None if part is None else list(part) if isinstance(part, tuple) else [part] for part in sharding.spec],
    }
    return json.dumps(told)


def parse(said: str) -> NamedSharding:
    """The sharding that `text` wrote down."""
    told = json.loads(said)
    ids = tuple(told["devices"] or range(math.prod(told["shape"])))
    return named(
        mesh_of(ids, tuple(told["shape"]), tuple(told["axes"])), tuple(None if part is None else tuple(part) for part in told["spec"])
    )


def named(of: Mesh, spec: Spec) -> NamedSharding:
    """The sharding of a tensor whose dims are divided over these axes, written in the shortest way."""
    parts: list[Any] = [None if not part else part[0] if len(part) == 1 else tuple(part) for part in spec]
    while parts and parts[-1] is None:
        parts.pop()
    return NamedSharding(of, PartitionSpec(*parts))


def fitting(of: Any, spec: Spec, shape: Sequence[int], what: str) -> NamedSharding:
    """`named` without the axes that do not divide their dim: such a dim stays whole on each device (torch_xla pads it; values are the same).
    An empty tensor has no parts: XLA gives each device all of it."""
    if 0 in shape:
        return named(of, ())
    fits: list[tuple[str, ...] | None] = []
    for dim, part in enumerate(spec):
        count = math.prod(of.shape[a] for a in part or ())
        if count > 1 and shape[dim] % count:
            logger.warning(
                "%s: dim %d of %s has %d elements, which %d devices (%s) do not divide: it is kept whole on each of them",
                what, dim, list(shape), shape[dim], count, ", ".join(part or ()),
            )  # fmt: skip
            fits.append(None)
        else:
            fits.append(part)
    return named(of, tuple(fits))


def fitted(sharding: NamedSharding, shape: Sequence[int], what: str) -> NamedSharding:
    """`fitting`, of a sharding that there is already."""
    return fitting(sharding.mesh, tuple(axes or None for axes in axes_of(sharding, len(shape))), shape, what)


def axes_of(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
    """By dim of a tensor, the mesh axes that divide it."""
    parts = (*sharding.spec, *[None] * ndim)[:ndim]
    return [() if part is None else part if isinstance(part, tuple) else (part,) for part in parts]


# -- arrays ---------------------------------------------------------------------------------------


def lies(array: object) -> NamedSharding | None:
    """How an array lies on the mesh; None for one that does not yet."""
    found = getattr(array, "sharding", None)
    if isinstance(found, NamedSharding) and found.mesh.devices.size == len(MODE.devices) and _same_order(found.mesh, mesh()):
        return found
    return None


@functools.lru_cache(maxsize=64)
def _same_order(a: Mesh, b: Mesh) -> bool:
    return list(a.devices.flat) == list(b.devices.flat)


def replicated() -> NamedSharding:
    """The sharding of what has no annotation."""
    return NamedSharding(mesh(), PartitionSpec())


def adopt(array: Any, facts: Any = None) -> Any:
    """The same values on the mesh: as the facts of their storage say (`ir.segment.Facts`), else as they lie, else replicated."""
    found = lies(array)
    said = None if facts is None else facts.spec or facts.start
    if isinstance(said, NamedSharding):
        return array if found is not None and found == in_order(said) else put(array, said)
    return array if found is not None else place_whole(array)


_PLACED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""By id, arrays that were given to all devices because nothing said how they lie."""


def place_whole(array: Any) -> Any:
    """The same values on every device, for want of an annotation."""
    made = put(array, replicated())
    _PLACED[id(made)] = made
    return made


def placed_whole(array: object) -> bool:
    """Whether an array is one of `place_whole`: no program computed it."""
    return _PLACED.get(id(array)) is array


def divided(array: object) -> bool:
    """Whether devices hold different parts of an array."""
    return active() and isinstance(array, jax.Array) and not array.is_fully_replicated


def put(array: Any, target: NamedSharding) -> Any:
    """The same values, lying so (`in_order`)."""
    target = in_order(target)
    if isinstance(array, abstract_arrays.AbstractArray):
        return abstract_arrays.AbstractArray(array.shape, array.dtype, target, array.host)
    with _compat.enable_x64():
        return jax.device_put(plain(array), target) if world.is_local() else _put_among_processes(plain(array), target)


def _put_among_processes(array: Any, target: NamedSharding) -> Any:
    """An array of this process, which every process has, or one of them all, which all of them move."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return array if array.sharding == target else _moving(target)(array)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, target, lambda index: host[index])


@functools.lru_cache(maxsize=256)
def _moving(target: NamedSharding) -> Any:
    return jax.jit(lambda x: x, out_shardings=target)


def whole(array: Any) -> Any:
    """An array whose value this process can read. Of one that is divided among processes, all of them must ask."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return array
    with _compat.enable_x64():
        return _moving(NamedSharding(array.sharding.mesh, PartitionSpec()))(array)  # type: ignore[attr-defined]


def from_parts(part: np.ndarray, target: NamedSharding) -> Any:
    """One array of what each process has of it: parts of one shape, one after the other along dim 0.

    Raises ValueError if a process's devices hold rows of another's part.
    """
    target, count, rows = in_order(target), world.process_count(), part.shape[0]
    shape = (rows * count, *part.shape[1:])
    first = rows * world.process_index()
    for index in target.addressable_devices_indices_map(shape).values():
        start, stop, _ = index[0].indices(shape[0])  # type: ignore[index]
        if start < first or stop > first + rows:
            raise ValueError(
                f"minibatch=True: each of {count} processes gives {rows} rows of {shape[0]}, and {target.spec} puts rows {start} to {stop} on a device of "
                f"process {world.process_index()}, which has rows {first} to {first + rows}. Divide dim 0 over a mesh axis along which devices of one process "
                "follow each other"
            )
    with _compat.enable_x64():
        return jax.make_array_from_process_local_data(target, part, shape)


def plain(found: object) -> Any:
    """What a storage holds, as an array."""
    from torch_bridge.mesh.stacked_arrays import plain as row

    return row(found)
