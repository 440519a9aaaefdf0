"""`torch_xla.distributed.spmd.xla_sharded_tensor`: an annotated tensor together with what its devices hold."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from torch_bridge import _compat
from torch_bridge.ir import dtypes
from torch_bridge.mesh import fills, spmd
from torch_bridge.recorder import annotate, manual_regions
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.runtime import executor, transfer
from torch_bridge.torch_xla.distributed.spmd import meshes

if TYPE_CHECKING:
    from types import EllipsisType

__all__ = ["XLAShard", "XLAShardedTensor"]


@dataclass
class XLAShard:
    """`xs.XLAShard`: what one device holds of a tensor, as it was when it was asked for.

    data: on the CPU, with zeros where the block is larger than its part of the tensor. indices: where it lies in the tensor, a slice for each dim;
    `...` if every device has all of it. shard_device: the device, `"xla:k"`. replica_id: which of the copies of this part it is.
    """

    data: torch.Tensor
    indices: EllipsisType | list[slice]
    shard_device: str
    replica_id: int

    @property
    def unpadded_data(self) -> torch.Tensor:
        """`data` without padding."""
        return self.data[self._inside()]

    @unpadded_data.setter
    def unpadded_data(self, values: torch.Tensor) -> None:
        self.data[self._inside()] = values

    def _inside(self) -> Any:
        if isinstance(self.indices, list):
            return tuple(slice(0, s.stop - s.start) for s in self.indices)
        return ...


class XLAShardedTensor(torch.Tensor):
    """`xs.XLAShardedTensor`: an xla tensor that has been annotated (`mark_sharding` gives one). Ops take it as they take `global_tensor`, and give such ones.

    global_tensor: the tensor itself, of its global shape. Autograd sees that one, so gradients are those of `global_tensor`.
    """

    global_tensor: torch.Tensor

    @staticmethod
    def __new__(cls, elem: torch.Tensor, *args: object, **kwargs: object) -> XLAShardedTensor:
        plain = unwrap(elem)
        with torch._C.DisableTorchFunctionSubclass():
            made = torch.Tensor._make_wrapper_subclass(
                cls, plain.size(), strides=plain.stride(), dtype=plain.dtype, layout=plain.layout, device=plain.device
            )
            made.__dict__["global_tensor"] = plain
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The op on the tensors themselves; tensors on xla among its results are wrapped."""
        plain_args, plain_kwargs = tree_map_only(XLAShardedTensor, unwrap, (args, kwargs or {}))
        found = _own_methods().get(func, func)(*plain_args, **plain_kwargs)
        if getattr(func, "__name__", "") in ("__get__", "__set__"):
            return found
        if args and isinstance(args[0], XLAShardedTensor) and found is args[0].__dict__["global_tensor"]:
            return args[0]  # in place
        return tree_map_only(torch.Tensor, wrapped, found)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Below `__torch_function__`, where only C++ arrives: on the tensors themselves."""
        return func(*tree_map_only(XLAShardedTensor, unwrap, args), **tree_map_only(XLAShardedTensor, unwrap, kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For `torch.save`: the tensor itself, whole. A file knows nothing of devices, and loads without xla."""
        return self.__dict__["global_tensor"].__reduce_ex__(protocol)

    def __copy__(self) -> XLAShardedTensor:
        """The same tensor once more, as in torch."""
        made = XLAShardedTensor(copy.copy(self.__dict__["global_tensor"]))
        made.__dict__.update({k: v for k, v in self.__dict__.items() if k != "global_tensor"})
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> XLAShardedTensor:
        """A tensor of its own that lies as this one. (torch's would copy what the tensor is recorded in.)"""
        if id(self) not in memo:
            attributes = dict(self.__dict__)
            made = memo[id(self)] = XLAShardedTensor(copy.deepcopy(attributes.pop("global_tensor"), memo))
            made.__dict__.update(copy.deepcopy(attributes, memo))
        return memo[id(self)]

    def tolist(self) -> Any:
        """The values of the whole tensor."""
        return self.__dict__["global_tensor"].tolist()

    @property
    def _storage(self) -> Any:
        return self.__dict__["global_tensor"]._storage

    @property
    def _layout(self) -> Any:
        return self.__dict__["global_tensor"]._layout

    @property
    def local_shards(self) -> list[XLAShard]:
        """What each device of this process holds, by device. Runs what is pending."""
        return shards(self.__dict__["global_tensor"])

    def load_local_shards_(self, shards: Sequence[XLAShard]) -> None:
        """Replace what the devices hold. Raises RuntimeError for another number of shards, other shapes, or a tensor that is not divided."""
        load(self.__dict__["global_tensor"], shards)

    @property
    def sharding_spec(self) -> str:
        """The sharding as XLA writes it; empty without one."""
        return sharding_text(self.__dict__["global_tensor"])

    @property
    def sharding_type(self) -> meshes.ShardingType | None:
        """How it lies; None without an annotation."""
        return type_of(self.__dict__["global_tensor"])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"XLAShardedTensor({self.__dict__['global_tensor']})"

    __str__ = __repr__


@functools.cache
def _own_methods() -> dict[Any, Callable[..., Any]]:
    """By function of `torch.Tensor`, what an xla tensor does instead."""
    own: dict[Any, Callable[..., Any]] = {}
    for name, mine in vars(XLATensor).items():
        torchs = getattr(torch.Tensor, name, None)
        if isinstance(mine, property) and torchs is not None:
            own.update({getattr(torchs, how): f for how, f in (("__get__", mine.fget), ("__set__", mine.fset)) if f is not None})
        elif inspect.isfunction(mine) and callable(torchs):
            own[torchs] = mine
    return own


def unwrap(t: object) -> Any:
    """The tensor itself."""
    return t.__dict__["global_tensor"] if isinstance(t, XLAShardedTensor) else t


def wrapped(t: object) -> Any:
    """An xla tensor as an `XLAShardedTensor`; anything else as it is."""
    if isinstance(t, torch.Tensor) and not isinstance(t, XLAShardedTensor) and t.device.type == "xla":
        return XLAShardedTensor(t)
    return t


def lies(t: torch.Tensor) -> jax.sharding.NamedSharding | None:
    """The annotation of a tensor, or how its value lies on the devices, if it was computed by an annotated program. None for a view."""
    plain = unwrap(t)
    said = annotate.annotation(plain)
    if said is not None:
        return said
    held = plain._storage.held if annotate.whole(plain) else None
    return None if held is None or not spmd.active() else spmd.lies(held)


def sharding_text(t: torch.Tensor) -> str:
    """`torch_xla._XLAC._get_xla_sharding_spec`: empty for a tensor without an annotation that no program has computed."""
    plain = unwrap(t)
    if manual_regions.inside(plain):
        return "{manual}"
    found = lies(plain)
    if found is None or (annotate.annotation(plain) is None and spmd.placed_whole(plain._storage.held)):
        return ""
    return meshes.said(found, t.dim())


def type_of(t: torch.Tensor) -> meshes.ShardingType | None:
    """`torch_xla._XLAC._get_xla_sharding_type`."""
    if manual_regions.inside(unwrap(t)):
        return meshes.ShardingType.MANUAL
    found = annotate.annotation(unwrap(t))
    return None if found is None else meshes.sharding_type(found, t.dim())


def shards(t: XLATensor) -> list[XLAShard]:
    """What each device holds of a tensor."""
    array = _computed(t)
    of = meshes.sharding_type(array.sharding, t.dim())
    number = {d: k for k, d in enumerate(spmd.devices())}
    found = []
    seen: dict[Any, int] = {}
    for shard in sorted(array.addressable_shards, key=lambda s: number[s.device]):
        place = tuple((s.start or 0, n if s.stop is None else s.stop) for s, n in zip(shard.index, array.shape, strict=True))
        copy = seen[place] = seen.get(place, -1) + 1
        data = transfer.from_numpy(np.array(shard.data))
        replicated = of is meshes.ShardingType.REPLICATED
        indices: Any = ... if replicated else [slice(a, b, 1) for a, b in place]
        found.append(XLAShard(data, indices, f"xla:{number[shard.device]}", number[shard.device] if replicated else copy))
    return found


def load(t: XLATensor, given: Sequence[XLAShard]) -> None:
    """Give the devices new blocks of a tensor."""
    array = _computed(t)
    if meshes.sharding_type(array.sharding, t.dim()) is meshes.ShardingType.REPLICATED:
        raise RuntimeError("load_local_shards_: the tensor is replicated, it has no shards. Write to it instead (t.copy_(values))")
    by_device = {s.shard_device: s.data for s in given}
    number = {d: k for k, d in enumerate(spmd.devices())}
    block = array.sharding.shard_shape(array.shape)
    names = [f"xla:{number[s.device]}" for s in array.addressable_shards]
    if sorted(by_device) != sorted(names) or len(given) != len(names):
        raise RuntimeError(
            f"load_local_shards_: needs one shard for each of {', '.join(sorted(names))}, got {len(given)}: {sorted(by_device)}"
        )
    wrong = {name: tuple(data.shape) for name, data in by_device.items() if tuple(data.shape) != block}
    if wrong:
        raise RuntimeError(f"load_local_shards_: every shard has shape {list(block)}, got {wrong}")
    with _compat.enable_x64():
        parts = [
            jax.device_put(transfer.to_numpy(by_device[name].to(t.dtype)).copy(), s.device)
            for name, s in zip(names, array.addressable_shards, strict=True)
        ]
        t._storage.held = jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
        t._storage.writes += 1


def _computed(t: XLATensor) -> Any:
    """The array of a tensor, on the mesh."""
    meshes.require_xla(t, "local_shards")
    storage = t._storage
    if t._layout is not storage.layout:
        storage = t.clone(memory_format=torch.contiguous_format)._storage  # type: ignore[attr-defined]
    executor.materialize(storage)
    storage.held = _filled(storage) if storage.constant else spmd.adopt(storage.held, storage.facts)
    return storage.array


def _filled(storage: Any) -> jax.Array:
    """The array of a storage that is one number throughout, which no program has computed."""
    base = storage.layout
    return fills.full(base.size, storage.fill, dtypes.to_jax(base.dtype), storage.facts and (storage.facts.spec or storage.facts.start))
