"""Meshes of `torch_xla.distributed.spmd`: the job's devices on named axes, and what a partition spec says of a tensor on them."""

from __future__ import annotations

import ast
import functools
import math
from collections import OrderedDict
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding

from torch_bridge import metrics
from torch_bridge.mesh import spmd
from torch_bridge.torch_xla import _spmd_variable

PartitionSpec = Sequence[Any]
"""One entry for each dim of a tensor: a mesh axis (its name, or its number), a tuple of them, or None."""


class ShardingError(ValueError, AssertionError):
    """A mesh, or a partition spec, that does not fit (torch_xla asserts, so it is an AssertionError, too)."""


class ShardingType(IntEnum):
    """`xs.ShardingType`: how a tensor lies on a mesh."""

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6


class Mesh:
    """`xs.Mesh`: the job's devices as an array of shape `mesh_shape`, row by row, with a name for each axis.

    device_ids: the numbers 0 to n - 1 of all devices, in any order. axis_names: None numbers the axes. Raises `ShardingError` for names, numbers or a shape
    that do not fit together.
    """

    def __init__(self, device_ids: Any, mesh_shape: Sequence[int], axis_names: Sequence[str] | None = None):
        self.device_ids = np.asarray(device_ids).reshape(-1)
        if any(n != int(n) or n < 1 for n in mesh_shape):
            raise ShardingError(f"mesh_shape {tuple(mesh_shape)} must have whole numbers of devices, 1 or more")
        self.mesh_shape = tuple(int(n) for n in mesh_shape)
        self.axis_names = None if axis_names is None else tuple(axis_names)
        self._named: dict[str, spmd.Spec] = {}
        count = math.prod(self.mesh_shape)
        if self.axis_names is not None and len(self.axis_names) != len(self.mesh_shape):
            raise ShardingError(f"axis_names {self.axis_names} must name the {len(self.mesh_shape)} axes of mesh_shape {self.mesh_shape}")
        if self.axis_names is not None and len(set(self.axis_names)) != len(self.axis_names):
            raise ShardingError(f"axis_names {self.axis_names} must differ from each other")
        if len(self.device_ids) != count:
            raise ShardingError(f"mesh_shape {self.mesh_shape} holds {count} devices, device_ids has {len(self.device_ids)}")
        if sorted(self.device_ids.tolist()) != list(range(count)):
            raise ShardingError(f"device_ids must be each of 0 to {count - 1} once, got {self.device_ids.tolist()}")

    @staticmethod
    def from_str(text: str) -> Mesh | None:
        """The mesh that `str(mesh)` wrote down; None for empty text. Raises `ShardingError` for other text."""
        if not text:
            return None
        try:
            told = ast.literal_eval(text)
            return Mesh(np.array(told["device_ids"]), tuple(told["mesh_shape"]), told["axis_names"])
        except (ValueError, SyntaxError, TypeError, KeyError) as error:
            if isinstance(error, ShardingError):
                raise
            raise ShardingError(f"Mesh.from_str takes what str(mesh) gives, got {text!r}") from error

    def __str__(self) -> str:
        return str({"device_ids": self.device_ids.tolist(), "mesh_shape": self.mesh_shape, "axis_names": self.axis_names})

    def size(self) -> int:
        """Devices."""
        return math.prod(self.mesh_shape)

    def shape(self) -> OrderedDict[Any, int]:
        """Axis sizes by name (by number without names)."""
        return OrderedDict(zip(self._axes(), self.mesh_shape, strict=True))

    def get_logical_mesh(self) -> np.ndarray:
        """The device numbers in the shape of the mesh."""
        return self.device_ids.reshape(self.mesh_shape)

    def get_jax_mesh(self) -> jax.sharding.Mesh:
        """The mesh for JAX; axes without names have their numbers as text."""
        require_on()
        return spmd.mesh_of(tuple(self.device_ids.tolist()), self.mesh_shape, tuple(str(a) for a in self._axes()))

    def get_axis_name_idx(self, name: str) -> int | None:
        """The number of the axis with a name; None if there is none."""
        return self.axis_names.index(name) if self.axis_names is not None and name in self.axis_names else None

    def get_op_sharding(self, partition_spec: PartitionSpec, flip: bool = False) -> OpSharding:
        """The sharding that a partition spec asks for on this mesh, as `torch_xla._XLAC` takes it."""
        spec = tuple(partition_spec)
        return OpSharding(self.sharding(spec), len(spec))

    def sharding(self, partition_spec: PartitionSpec, shape: Sequence[int] | None = None) -> NamedSharding:
        """The same for JAX. shape: of the tensor; a dim that its devices do not divide stays whole.

        Raises `ShardingError` for a spec that does not fit.
        """
        require_on()
        if self.size() != len(spmd.devices()):
            raise ShardingError(
                f"the mesh {dict(self.shape())} has {self.size()} devices, the job {len(spmd.devices())}: a mesh has all devices of the job "
                "(xr.global_runtime_device_count())"
            )
        names = tuple(str(a) for a in self._axes())
        spec = self.named(tuple(partition_spec))
        of = spmd.mesh_of(tuple(self.device_ids.tolist()), self.mesh_shape, names)
        if shape is None:
            return spmd.named(of, spec)
        if len(shape) != len(spec):
            raise ShardingError(
                f"a partition spec has one entry for each dim: {tuple(partition_spec)} has {len(spec)}, the tensor of shape {list(shape)} has {len(shape)}"
            )
        return spmd.fitting(of, spec, shape, "mark_sharding")

    def named(self, spec: tuple[Any, ...]) -> spmd.Spec:
        """A partition spec with axes by name, each dim's as a tuple; worked out once, which the counter `CreateOpSharding` says."""
        found = self._named.get(repr(spec))
        if found is None:
            found = self._named[repr(spec)] = self._checked(spec)
            metrics.count("CreateOpSharding")
        return found

    def _checked(self, spec: tuple[Any, ...]) -> spmd.Spec:
        names = [str(a) for a in self._axes()]
        found: list[tuple[str, ...] | None] = []
        for entry in spec:
            axes = entry if isinstance(entry, (tuple, list)) else (entry,)
            found.append(tuple(self._name(a, names, spec) for a in axes if a is not None) or None)
        used = [a for part in found for a in part or ()]
        if len(set(used)) != len(used):
            raise ShardingError(f"partition spec {spec}: a mesh axis divides one dim at most, once")
        return tuple(found)

    def _name(self, axis: Any, names: list[str], spec: tuple[Any, ...]) -> str:
        if isinstance(axis, (int, np.integer)) and not isinstance(axis, bool) and 0 <= axis < len(names):
            return names[int(axis)]
        if isinstance(axis, str) and self.axis_names is not None and axis in names:
            return axis
        raise ShardingError(
            f"partition spec {spec}: {axis!r} is no axis of the mesh {dict(self.shape())}; give a name, a number below {len(names)}, or None"
        )

    def _axes(self) -> tuple[Any, ...]:
        return tuple(range(len(self.mesh_shape))) if self.axis_names is None else self.axis_names

    def __repr__(self) -> str:
        return f"Mesh({dict(self.shape())})"


class HybridMesh(Mesh):
    """`xs.HybridMesh`: a mesh of several machines, whose axes are products of an axis within a machine (`ici_mesh_shape`) and one between machines
    (`dcn_mesh_shape`, 1 by default).

    Devices of one machine have following numbers here, so along each axis those of one machine come first. Raises ValueError for shapes that do not fit.
    """

    def __init__(
        self, *, ici_mesh_shape: Sequence[int], dcn_mesh_shape: Sequence[int] | None = None, axis_names: Sequence[str] | None = None
    ):
        inner = tuple(ici_mesh_shape)
        outer = (1,) * len(inner) if dcn_mesh_shape is None else tuple(dcn_mesh_shape)
        if len(inner) != len(outer):
            raise ShardingError(f"ici_mesh_shape {inner} and dcn_mesh_shape {outer} must have as many axes")
        self.ici_mesh_shape, self.dcn_mesh_shape = inner, outer
        ids = np.arange(math.prod(inner) * math.prod(outer)).reshape(*outer, *inner)
        n = len(inner)
        ids = ids.transpose([k for pair in zip(range(n), range(n, 2 * n), strict=True) for k in pair])
        super().__init__(ids.reshape(-1), [a * b for a, b in zip(inner, outer, strict=True)], axis_names)


class OpSharding:
    """`torch_xla._XLAC.OpSharding`: how a tensor of some rank is divided. sharding: for JAX; ndim: dims of the tensor, None: any (replicated).

    Scripts make one as `OpSharding(tile_assignment, group_assignment, replication_groups, sharding_type)`: a nested list with a device for each part, with the
    devices that have the same part along one more dim for PARTIAL; the groups follow from it. Raises `ShardingError` for other types and devices.
    """

    def __init__(self, sharding: Any, ndim: Any = None, replication_groups: Any = None, sharding_type: int | None = None):
        if isinstance(sharding, NamedSharding):
            self.sharding, self.ndim = sharding, ndim
        else:
            self.sharding, self.ndim = _of_tiles(np.asarray(sharding, dtype=int), sharding_type)

    @property
    def type(self) -> ShardingType:
        """How it lies."""
        return sharding_type(self.sharding, self.ndim or 0)

    def __repr__(self) -> str:
        return said(self.sharding, self.ndim or 0)


def _of_tiles(tiles: np.ndarray, kind: int | None) -> tuple[NamedSharding, int | None]:
    require_on()
    count = len(spmd.devices())
    if kind == ShardingType.REPLICATED:
        return spmd.replicated(), None
    if kind not in (ShardingType.TILED, ShardingType.PARTIAL):
        known = ", ".join(f"{t.name} ({int(t)})" for t in (ShardingType.REPLICATED, ShardingType.TILED, ShardingType.PARTIAL))
        raise ShardingError(
            f"OpSharding(tile_assignment, group_assignment, replication_groups, sharding_type) takes the types {known}, got {kind!r}"
        )
    if sorted(tiles.reshape(-1).tolist()) != list(range(count)):
        raise ShardingError(f"the tile assignment must have each of the job's {count} devices once, got {tiles.tolist()}")
    ndim = tiles.ndim - (kind == ShardingType.PARTIAL)
    axes = tuple(f"dim{k}" for k in range(ndim)) + (("copies",) if kind == ShardingType.PARTIAL else ())
    of = spmd.mesh_of(tuple(tiles.reshape(-1).tolist()), tiles.shape, axes)
    return spmd.named(of, tuple((axes[k],) if tiles.shape[k] > 1 else None for k in range(ndim))), ndim


@functools.lru_cache(maxsize=256)
def said(sharding: NamedSharding, ndim: int) -> str:
    """A sharding as XLA writes it: `{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}`, `{replicated}`."""
    parts = spmd.axes_of(sharding, ndim)
    names, sizes = sharding.mesh.axis_names, sharding.mesh.devices.shape
    used = [a for part in parts for a in part if sharding.mesh.shape[a] > 1]
    if not used:
        return "{replicated}"
    rest = [a for a in names if a not in used]
    number = {d: k for k, d in enumerate(spmd.devices())}
    ids = np.vectorize(number.get)(sharding.mesh.devices).reshape(sizes)
    flat = ids.transpose([names.index(a) for a in (*used, *rest)]).reshape(-1)
    tiles = [math.prod(sharding.mesh.shape[a] for a in part) for part in parts]
    whole = math.prod(sharding.mesh.shape[a] for a in rest)
    tail = " last_tile_dim_replicate" if whole > 1 else ""
    return f"{{devices=[{','.join(map(str, [*tiles, *([whole] if whole > 1 else [])]))}]{','.join(map(str, flat.tolist()))}{tail}}}"


def sharding_type(sharding: NamedSharding, ndim: int) -> ShardingType:
    """The type of a sharding of a tensor of this rank."""
    text = said(sharding, ndim)
    if text == "{replicated}":
        return ShardingType.REPLICATED
    return ShardingType.PARTIAL if "last_tile_dim_replicate" in text else ShardingType.TILED


_GLOBAL: list[Mesh] = []


def set_global_mesh(mesh: Mesh) -> None:
    """`xs.set_global_mesh`: the mesh that FSDPv2 and the user's own code ask for."""
    _GLOBAL[:] = [mesh]


def get_global_mesh() -> Mesh | None:
    """`xs.get_global_mesh`: the mesh that was set; None without."""
    return _GLOBAL[0] if _GLOBAL else None


def forget_global_mesh() -> None:
    """The devices that `set_global_mesh` named are gone."""
    _GLOBAL.clear()


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """`xs.get_1d_mesh`: all devices of the job on one axis."""
    require_on()
    count = len(spmd.devices())
    return Mesh(range(count), (count,), None if axis_name is None else (axis_name,))


def require_on() -> None:
    """Raise RuntimeError unless annotations are on."""
    if not _spmd_variable.begin_if_asked():
        raise RuntimeError(
            "torch_xla.distributed.spmd: sharding annotations are for programs over all devices. Call torch_xla.runtime.use_spmd() at the beginning of the "
            "script, before the first tensor goes to xla"
        )


def require_xla(t: Any, what: str) -> None:
    """Raise unless a tensor is on xla, in a script that has annotations."""
    require_on()
    if not isinstance(t, torch.Tensor) or t.device.type != "xla":
        kind = f"one on {t.device}" if isinstance(t, torch.Tensor) else type(t).__name__
        raise ShardingError(f"{what} takes a tensor on xla, got {kind}: move it first (t.to('xla'))")
