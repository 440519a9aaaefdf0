"""How a parallel layer's weights are cut, where their parts live and how they are initialised.

A full float32 weight is drawn on the CPU, cut and cast, so that one torch seed gives the same global weights for any number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.types import Device

from nxd_jax.tensor_parallel import layer_groups
from nxd_jax.tensor_parallel.keeps_marks import KeepsMarks
from nxd_jax.tensor_parallel.partition import divide, set_tensor_model_parallel_attributes
from torch_bridge.mesh import world

Init = Callable[[torch.Tensor], Any]


@dataclasses.dataclass(frozen=True)
class Entries:
    """How ranks share out the entries of dim 0, such as experts: member k of `group` holds the entries `held[k]`, in this order."""

    group: Any
    held: tuple[tuple[int, ...], ...]

    def part(self, full: torch.Tensor, world_rank: int) -> torch.Tensor:
        """The entries that a rank of the world holds, as a tensor of its own."""
        return full.detach()[list(self.held[layer_groups.place_of(self.group, world_rank)])]

    def local(self, full: torch.Tensor) -> torch.Tensor:
        """Each rank's entries of an xla tensor."""
        from torch_bridge.recorder import sharded

        index = sharded.from_ranks(lambda r: torch.tensor(self.held[layer_groups.place_of(self.group, r)]), sharded.axes_of(self.group))
        return full.detach().index_select(0, index)


@dataclasses.dataclass(frozen=True)
class Partition:
    """How ranks share a tensor out: `group.size` parts along `dim`, member k of `group` holding part k.

    group: None if `dim` is not cut. stride: how many tensors lie fused along `dim` (gate and up: 2), each shared out by itself. entries: a cut of dim 0
    besides, among the ranks of another group, as of experts among expert parallel ranks.
    """

    group: Any
    dim: int
    stride: int = 1
    rank_ordering: tuple[int, ...] | None = None
    entries: Entries | None = None

    @property
    def size(self) -> int:
        """Parts along `dim`."""
        return 1 if self.group is None else layer_groups.size(self.group)

    @property
    def is_cut(self) -> bool:
        """Whether ranks hold different parts."""
        return self.size > 1 or (self.entries is not None and len(self.entries.held) > 1)

    def local_shape(self, full: Sequence[int]) -> list[int]:
        """The shape of a part."""
        shape = [divide(n, self.size) if d == self.dim else n for d, n in enumerate(full)]
        return shape if self.entries is None else [divide(shape[0], len(self.entries.held)), *shape[1:]]

    def full_shape(self, local: Sequence[int]) -> list[int]:
        """The shape of the full tensor, given a part's."""
        shape = [n * self.size if d == self.dim else n for d, n in enumerate(local)]
        return shape if self.entries is None else [shape[0] * len(self.entries.held), *shape[1:]]

    def part(self, full: torch.Tensor, world_rank: int) -> torch.Tensor:
        """What a rank of the world holds of a full tensor, as a tensor of its own."""
        held = full if self.entries is None else self.entries.part(full, world_rank)
        return cut(held, self.dim, divide(full.shape[self.dim], self.size), self.stride, self.index_of(world_rank), self.size)

    def index_of(self, world_rank: int) -> int:
        """The part along `dim` that a rank of the world holds."""
        return 0 if self.group is None else layer_groups.place_of(self.group, world_rank)

    def hosts_several(self) -> bool:
        """Whether this process holds several different parts."""
        return any(layer_groups.hosts_several(group) for _, group in self._cuts())

    def axes(self) -> dict[int, tuple[str, ...]]:
        """By dim the mesh axes over which parts differ: the label of the tensor that consists of them. (Groups that are no lines of the mesh take all axes.)"""
        from torch_bridge.recorder import sharded

        found: dict[int, tuple[str, ...]] = {}
        for dim, group in self._cuts():
            taken = {a for own in found.values() for a in own}
            found[dim] = (*found.get(dim, ()), *(a for a in sharded.axes_of(group) if a not in taken))
        return found

    def _cuts(self) -> list[tuple[int, Any]]:
        cuts = [(0, self.entries and self.entries.group), (self.dim, self.group)]
        return [(dim, group) for dim, group in cuts if group is not None]

    def mark(self, parameter: torch.Tensor) -> None:
        """Set the attributes by which the rest of the library knows that tensor parallel ranks share a parameter out."""
        if self.group is not None and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, True, self.dim, self.stride, self.size, self.rank_ordering)


def cut(full: torch.Tensor, dim: int, part: int, stride: int, index: int, count: int) -> torch.Tensor:
    """Part `index` of `count`, of `part` entries along `dim`: every `count`-th of the blocks of `part / stride`, from block `index` on."""
    blocks = torch.split(full.detach(), divide(part, stride), dim=dim)
    return torch.cat(blocks[index::count], dim=dim)


def local(full: torch.Tensor, partition: Partition, part: int) -> torch.Tensor:
    """A rank's own part, of `part` entries along the partition's dim. An xla tensor is cut where it is."""

    def of(rank: int) -> torch.Tensor:
        held = full if partition.entries is None else partition.entries.part(full, rank)
        return cut(held, partition.dim, part, partition.stride, partition.index_of(rank), partition.size)

    if not partition.hosts_several():
        return of(world.first())
    if full.device.type != "xla":
        return from_parts(lambda r: own(of(r), r), partition, differs=differs(full))
    from torch_bridge.recorder import sharded

    full = full if partition.entries is None else partition.entries.local(full)
    block = divide(part, partition.stride)
    first = 0 if partition.group is None else layer_groups.rank(partition.group) * block
    starts = range(0, full.shape[partition.dim], block * partition.size)
    found = torch.cat([full.detach().narrow(partition.dim, start + first, block) for start in starts], dim=partition.dim)
    sharded.expect(found, partition.axes())
    return found


def place(full: torch.Tensor, partition: Partition | None, dtype: torch.dtype, device: Device) -> torch.Tensor:
    """A rank's part of a full CPU tensor (all of it without a partition), on a device.

    If this process hosts several ranks, their parts go to xla whatever the device, as one tensor that differs by rank.
    """
    if partition is None:
        return full.to(device=device, dtype=dtype, copy=True)
    if partition.hosts_several():
        return from_parts(lambda r: partition.part(own(full, r), r).to(dtype), partition, device, differs(full))
    part = partition.part(full, world.first()).to(dtype)
    return placed_alone(part, partition, device)


def own(full: torch.Tensor, rank: int) -> torch.Tensor:
    """A world rank's own full weight, where each has drawn one after a seed that differs by rank."""
    from torch_bridge.recorder import rank_tensor

    return rank_tensor.own(full, world.current().hosted.index(rank))


def differs(full: torch.Tensor) -> bool:
    """Whether ranks have different full weights."""
    from torch_bridge.recorder import rank_tensor

    return isinstance(full, rank_tensor.RankTensor)


def from_parts(of: Callable[[int], torch.Tensor], partition: Partition, device: Device = "xla", differs: bool = False) -> torch.Tensor:
    """An xla tensor that is `of(world_rank)` on each rank, labelled as the partition says. device: where a process with one rank would have its part.
    differs: ranks that hold the same part may have different values of it."""
    from torch_bridge.recorder import cpu_draws, sharded

    axes = partition.axes()
    found = sharded.from_ranks(of) if differs else sharded.from_ranks(of, axes)
    if differs:
        sharded.expect(found, axes)
    if torch.device(device or "cpu").type == "cpu":
        cpu_draws.mark(found)
    return found


def placed_alone(part: torch.Tensor, partition: Partition, device: Device) -> torch.Tensor:
    """The part of the only rank that this process hosts, on the device asked for."""
    if torch.device(device or "cpu").type == "xla":
        return from_parts(lambda r: own(part, r), partition, differs=differs(part))
    return part.to(device=device)


class Owner(KeepsMarks):
    """A module with parameters that ranks share out. `_partitions`: how, by their names."""

    _partitions: dict[str, Partition]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """What `.to("xla")` goes through: a part that was on the CPU (of the only rank in this process) is not the same on all ranks."""
        from torch_bridge.recorder import cpu_draws

        stands = {name for name in self._partitions if cpu_draws.is_marked(self._parameters.get(name))}
        stays = bool(stands) and fn(torch.empty(0)).device.type == "cpu"
        super()._apply(fn, recurse)
        for name, partition in self._partitions.items():
            parameter = self._parameters.get(name)
            if parameter is not None and parameter.device.type == "xla" and partition.is_cut:
                _label(parameter, partition)
                if name in stands:
                    cpu_draws.mark(parameter, stays)
        return self


def _label(parameter: Any, partition: Partition) -> None:
    from torch_bridge.mesh import sharding
    from torch_bridge.runtime import executor

    storage = parameter._storage
    executor.materialize(storage)
    if storage.held is None or sharding.axes_of(storage.held.sharding.spec):
        return
    spec = sharding.spec_for(partition.axes())
    storage.array = sharding.relabel(storage.array, storage.layout.size, spec)
    storage.describe(spec=spec)


def padded(full: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """A tensor with `count` zeros more at the end of a dim."""
    if not count:
        return full
    zeros = full.new_zeros([count if d == dim % full.dim() else n for d, n in enumerate(full.shape)])
    return torch.cat([full, zeros], dim=dim)


def drawn(shape: Sequence[int], init: Init) -> torch.Tensor:
    """A full float32 weight on the CPU, initialised."""
    full = torch.empty(*shape, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        init(full)
    return full


def default_init(weight: torch.Tensor) -> torch.Tensor:
    """What `torch.nn.Linear` and `torch.nn.Conv2d` do."""
    return torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def default_bias(fan_in: int) -> Init:
    """What `torch.nn.Linear` does: uniform within 1 / sqrt(fan_in)."""
    bound = 1.0 / math.sqrt(fan_in) if fan_in else 0.0
    return lambda bias: torch.nn.init.uniform_(bias, -bound, bound)


_shapes_only = False


def is_meta(device: Device) -> bool:
    """Whether a layer is to have shapes only for now: because of its device, or because it is made within `shapes_only()`."""
    return _shapes_only or _device_of(device).type == "meta"


def home(device: Device) -> torch.device:
    """Where weights that are drawn now go: to the layer's device, to the CPU for one on "meta"."""
    found = _device_of(device)
    return torch.device("cpu") if found.type == "meta" else found


def _device_of(device: Device) -> torch.device:
    """A layer's device: without one torch's default device, as of `with torch.device("meta"):`."""
    return torch.get_default_device() if device is None else torch.device(device)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Parallel layers made in the block have weights on "meta", whatever device they are given, and draw nothing."""
    global _shapes_only
    before, _shapes_only = _shapes_only, True
    try:
        yield
    finally:
        _shapes_only = before


def assign(module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Make a tensor the value of a parameter: of a new one, or of one that exists, which stays the same object with the same attributes."""
    from torch_bridge.device import module_to
    from torch_bridge.passes import check_replicas

    parameter = module._parameters[name]
    if parameter is None:
        setattr(module, name, torch.nn.Parameter(value))
    elif parameter.device == value.device and parameter.shape == value.shape:
        parameter.data = value
    else:
        module_to._swap(parameter, value, f"{type(module).__name__}.{name}")
    if value.device.type == "xla":
        check_replicas.own(module, name, module._parameters[name])
