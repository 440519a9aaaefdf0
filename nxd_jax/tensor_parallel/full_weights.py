"""The full tensor of a parameter that tensor and expert parallel ranks share out, and back: for checkpoints and tests. (NxD has no such functions.)

How ranks share a parameter out is in its attributes: `tensor_model_parallel`, `partition_dim`, `partition_stride`, `num_partitions`, `rank_ordering`,
`qkv_partition` on a fused GQA weight; and `expert_model_parallel` and `expert_distribution` on those of experts, of which the full tensor has all, in the
order of their numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nxd_jax.tensor_parallel import expert_shares, kv_groups, layer_groups, sharded_weights
from torch_bridge.collectives import functional
from torch_bridge.mesh import groups, world
from torch_bridge.mesh.groups import GroupLike
from torch_bridge.recorder import placed, sharded

Full = torch.Tensor | tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Shares:
    """How the ranks of one group share out a tensor: rank r of the world holds part `index[r]` of `count` different ones along `dim`.

    stride: how many tensors lie fused along `dim`, each shared out by itself. index: in the group's order; with fewer parts than ranks some hold copies.
    """

    dim: int
    stride: int
    count: int
    index: dict[int, int]

    def full_shape(self, local: Sequence[int]) -> list[int]:
        """The shape of the full tensor, given a part's."""
        return [n * self.count if d == self.dim else n for d, n in enumerate(local)]

    def part(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """What a rank of the world holds of a full tensor."""
        size = full.shape[self.dim] // self.count
        return sharded_weights.cut(full, self.dim, size, self.stride, self.index[rank], self.count)

    def with_copies(self) -> Shares:
        """How the ranks share out the tensor that holds every part as often as ranks do (in rank order); the same if no part is held twice."""
        if self.count == len(self.index):
            return self
        return dataclasses.replace(self, count=len(self.index), index={r: k for k, r in enumerate(self.index)})

    def join(self, held: dict[int, torch.Tensor]) -> torch.Tensor:
        """The full tensor from what the ranks hold."""
        different = {k: held[rank] for rank, k in reversed(self.index.items())}
        blocks = [different[k].chunk(self.stride, self.dim) for k in range(self.count)]
        return torch.cat([b[s] for s in range(self.stride) for b in blocks], self.dim)


def is_shared_out(parameter: torch.Tensor) -> bool:
    """Whether tensor parallel ranks hold different parts of a parameter."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def is_divided(parameter: torch.Tensor) -> bool:
    """Whether tensor or expert parallel ranks hold different parts of a parameter."""
    return is_shared_out(parameter) or expert_shares.is_shared_out(parameter)


def cuts_of(parameter: torch.Tensor, group: GroupLike = None) -> dict[int, tuple[str, ...]]:
    """By dim the mesh axes over which ranks hold different parts of a parameter: how a tensor that lies as it does is labelled. group: as in `gather_full`."""
    entries = expert_shares.entries_of(parameter)
    if not is_shared_out(parameter):
        return {} if entries is None else sharded_weights.Partition(None, 0, entries=entries).axes()
    found: Any = parameter
    return sharded_weights.Partition(layer_groups.tensor_parallel(group), found.partition_dim % parameter.dim(), entries=entries).axes()


def cuts_now(parameter: torch.Tensor, group: GroupLike = None) -> dict[int, tuple[str, ...]]:
    """`cuts_of`, and the mesh axes along which the present value of a parameter on xla differs besides."""
    cuts = cuts_of(parameter, group)
    known = {a for axes in cuts.values() for a in axes}
    more = tuple(a for a in sharded.varying(parameter).axes if a not in known)
    first = next(iter(cuts), 0)
    return {**cuts, first: (*cuts.get(first, ()), *more)} if more else cuts


def gather_full(tensor: torch.Tensor, like: torch.Tensor | None = None, group: GroupLike = None, rank: int | None = None) -> Full:
    """The full value of a parameter on the CPU, in its dtype: what the tensor parallel ranks hold, joined. Of a fused GQA weight or bias: (q, k, v).

    tensor: a parameter, or with `like` a tensor that is shared out as the parameter `like` is (its gradient, an optimizer's moment). K/V heads
    that several ranks hold are taken once; padding that a layer added stays. Of experts it has all, in the order of their numbers. One that all ranks hold
    is returned as this process has it.
    group: the ranks that share it out, if its layer was given a group; default the tensor parallel group. rank: of which rank of the world the
    groups are meant (stages differ); default the first that this process hosts.

    Under torchrun all processes must call it, in the same order. Raises ValueError if `tensor` and `like` differ in shape, RuntimeError for "meta".
    """
    parameter = tensor if like is None else like
    if tensor.shape != parameter.shape:
        raise ValueError(f"a tensor of shape {list(tensor.shape)} is not shared out like a parameter of shape {list(parameter.shape)}")
    _check_values(tensor)
    member = world.first() if rank is None else rank
    entries = expert_shares.entries_of(parameter)
    if entries is not None:
        return _all_experts(tensor.detach(), parameter, entries, group, member)
    if not is_shared_out(parameter):
        return tensor.detach().cpu() if rank is None else _hosted(tensor)[member]
    return _over_tensor_parallel(tensor.detach(), parameter, layer_groups.tensor_parallel(group), member)


def _all_experts(tensor: torch.Tensor, parameter: torch.Tensor, entries: Any, group: GroupLike, member: int) -> Full:
    """What tensor parallel ranks hold, joined, of all experts."""
    peers = expert_shares.members(entries, member)
    if not set(world.current().hosted).issuperset(peers):
        if tensor.device.type != "xla":
            local = tensor
            tensor = sharded.from_ranks(lambda r: local, cuts_of(parameter, group))
        tensor, peers = expert_shares.gathered(tensor, entries), [member]
    if not is_shared_out(parameter):
        values = _hosted(tensor)
        found: list[Any] = [values[r] for r in peers]
    else:
        found = [_over_tensor_parallel(tensor, parameter, layer_groups.tensor_parallel(group), r) for r in peers]
    return found[0] if len(found) == 1 else expert_shares.joined(found, entries.held)


def _over_tensor_parallel(tensor: torch.Tensor, parameter: torch.Tensor, group: Any, member: int) -> Full:
    """What the tensor parallel ranks of a rank hold, joined."""
    held = _held(tensor, group, member)
    joined = tuple(shares.join({r: t.narrow(0, start, size) for r, t in held.items()} if size else held)
                   for shares, start, size in _pieces(parameter, group, member))  # fmt: skip
    return joined[0] if len(joined) == 1 else joined


def scatter_full(parameter: torch.Tensor, full: Full | Callable[[int], Full], group: GroupLike = None) -> None:
    """Write a full value into a parameter, each rank its part: the inverse of `gather_full`. It stays the same object with the same attributes.

    full: a CPU tensor, for a fused GQA weight (q, k, v), as `cut_full` takes them; or a function from a rank of the world to it, where tensor parallel
    groups have different ones. group: as in `gather_full`.

    Raises ValueError for another shape, RuntimeError for a parameter on "meta" or (if this process hosts several ranks) a shared one on the CPU.
    """
    _check_values(parameter)
    write(parameter, lambda r: cut_full(parameter, full(r) if callable(full) else full, r, group), group)


def cut_full(parameter: torch.Tensor, full: Full, rank: int, group: GroupLike = None, layer: object = None) -> torch.Tensor:
    """What a rank of the world holds of a parameter's full value, in the value's dtype. layer: whose parameter it is, as in `expert_shares.entries_of`.

    K and V may have each head once, or as often as ranks hold it (NxD's converted checkpoints); fused q, k and v may be one tensor, below each other.
    Raises ValueError if the full value has another shape.
    """
    entries = expert_shares.entries_of(parameter, layer)
    if entries is not None:
        full = _own_experts(parameter, full, entries, rank)
    if not is_shared_out(parameter):
        if isinstance(full, torch.Tensor):
            _check_shape(full, list(parameter.shape), parameter)
            return full
        raise ValueError(f"a parameter of shape {list(parameter.shape)} that all ranks hold takes one tensor, got {len(full)}")
    pieces = _pieces(parameter, layer_groups.tensor_parallel(group), rank)
    local = [[size, *parameter.shape[1:]] if size else list(parameter.shape) for _, _, size in pieces]
    several = tuple(full) if not isinstance(full, torch.Tensor) else _unfused(full, pieces, local)
    if len(several) != len(pieces):
        needed = "the three tensors (q, k, v)" if len(pieces) == 3 else "one tensor"
        raise ValueError(f"a parameter of shape {list(parameter.shape)} takes {needed}, got {len(several)}")
    found = []
    for value, (shares, _, _), shape in zip(several, pieces, local, strict=True):
        if list(value.shape) == shares.with_copies().full_shape(shape):
            shares = shares.with_copies()
        _check_shape(value, shares.full_shape(shape), parameter)
        found.append(shares.part(value, rank))
    return found[0] if len(found) == 1 else torch.cat(found)


def plain_shares(parameter: torch.Tensor, group: GroupLike = None) -> Shares | None:
    """How the tensor parallel ranks of the world share out a parameter (of experts, those that they have), if each holds one part along one dim; None for
    fused q, k and v. group: as in `gather_full`."""
    found: dict[int, int] = {}
    ranks = layer_groups.tensor_parallel(group)
    for rank in range(world.size()) if is_shared_out(parameter) else ():
        if parameter.num_partitions == world.size() != layer_groups.size(ranks):  # type: ignore[attr-defined]
            return None  # ranks number themselves
        (piece, *others) = _pieces(parameter, ranks, rank)
        if others:
            return None
        found[rank] = piece[0].index[rank]
    return dataclasses.replace(piece[0], index=found) if found else None


def _own_experts(parameter: torch.Tensor, full: Full, entries: Any, rank: int) -> torch.Tensor:
    """Of the full tensor of all experts, those of a rank."""
    if not isinstance(full, torch.Tensor):
        raise ValueError(f"a parameter of shape {list(parameter.shape)} of experts takes one tensor, got {len(full)}")
    count = sum(map(len, entries.held))
    if full.dim() != parameter.dim() or full.shape[0] != count:
        raise ValueError(
            f"a parameter of shape {list(parameter.shape)} is of {count} experts that {len(entries.held)} expert parallel ranks share out, its full value "
            f"has shape {list(full.shape)}: dim 0 must be the experts"
        )
    part: torch.Tensor = entries.part(full, rank)
    return part


def _unfused(full: torch.Tensor, pieces: list[tuple[Shares, int, int]], local: list[list[int]]) -> tuple[torch.Tensor, ...]:
    """The full q, k and v that lie below each other in one tensor; anything else as it is."""
    for copies in (False, True):
        rows = [
            (shares.with_copies() if copies else shares).full_shape(shape)[0] for (shares, _, _), shape in zip(pieces, local, strict=True)
        ]
        if len(pieces) == 3 and sum(rows) == full.shape[0]:
            return full.split(rows)
    return (full,)


def write(parameter: torch.Tensor, of: Callable[[int], torch.Tensor], group: GroupLike = None) -> None:
    """Copy `of(rank)`, what a rank of the world holds, into a parameter, called once for each place along the mesh axes that it differs over.

    It differs over those along which it is shared out, and those along which its present value does. Raises as `scatter_full`.
    """
    with torch.no_grad():
        if parameter.device.type == "xla":
            dtype = parameter.dtype
            value = sharded.from_ranks(lambda r: of(r).to(dtype).contiguous(), cuts_now(parameter, group))
            parameter.copy_(beside(value, parameter))
            return
        kind = _several(parameter, group)
        if kind:
            raise RuntimeError(
                f"a parameter of shape {list(parameter.shape)} that {kind} parallel ranks share out is on {parameter.device}, and this process hosts "
                "several of them: a CPU tensor cannot hold all parts. Make the model after initialize_model_parallel, or move it to xla first"
            )
        parameter.copy_(of(world.first()))


def _several(parameter: torch.Tensor, group: GroupLike) -> str:
    """Which kind of ranks share a parameter out of which this process hosts several; "" if there is none."""
    entries = expert_shares.entries_of(parameter)
    if is_shared_out(parameter) and layer_groups.hosts_several(layer_groups.tensor_parallel(group)):
        return "tensor"
    return "expert" if entries is not None and layer_groups.hosts_several(entries.group) else ""


def beside(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A value on xla where a parameter lies: on the cores of its pipeline stage, say."""
    home = placed.place_of(parameter) if parameter.device.type == "xla" else None
    return value if home is None else placed.moved(value, home)


def _pieces(parameter: Any, group: Any, rank: int) -> list[tuple[Shares, int, int]]:
    """What a parameter consists of: how each piece is shared out, and its first row and rows within a rank's part (0: all)."""
    count, stride = parameter.num_partitions, getattr(parameter, "partition_stride", 1)
    partition = sharded_weights.Partition(
        layer_groups.ordered(group, getattr(parameter, "rank_ordering", None)), parameter.partition_dim, stride
    )
    dim = parameter.partition_dim % parameter.dim()
    fused = getattr(parameter, "qkv_partition", None)
    members = groups.resolve(group).of(rank)
    own = {r: partition.index_of(r) for r in members}
    if fused is not None:
        q, kv, copies = fused
        heads = Shares(dim, stride, len(members) // copies, _places_of_kv(members, copies) if copies > 1 else own)
        return [(Shares(dim, stride, len(members), own), 0, q), (heads, q, kv), (heads, q + kv, kv)]
    if count == len(members):
        return [(Shares(dim, stride, count, own), 0, 0)]
    if len(members) % count:
        raise ValueError(
            f"a parameter of shape {list(parameter.shape)} is in {count} parts, but its group has {len(members)} ranks: pass the group of its layer"
        )
    return [(Shares(dim, stride, count, _places_of_kv(members, len(members) // count)), 0, 0)]


def _places_of_kv(members: Sequence[int], copies: int) -> dict[int, int]:
    """For each member of a tensor parallel group: which part of K and V it holds, the place of its K/V group among the group's."""
    sharing = [g for g in kv_groups.lists() if g[0] in members]
    if len(sharing[0]) != copies:
        raise ValueError(f"K/V groups have {len(sharing[0])} ranks, but the parameter says that {copies} ranks hold each part")
    return {r: next(k for k, g in enumerate(sharing) if r in g) for r in members}


def _hosted(tensor: torch.Tensor) -> dict[int, torch.Tensor]:
    """What each rank that this process hosts holds, on the CPU."""
    hosted = world.current().hosted
    if tensor.device.type != "xla":
        return {r: tensor.detach() for r in hosted}
    return dict(zip(hosted, sharded.shards(tensor.detach()), strict=True))


def _held(tensor: torch.Tensor, group: GroupLike, rank: int) -> dict[int, torch.Tensor]:
    """What each rank of `rank`'s group holds, on the CPU; gathered from other processes if this one does not host them all."""
    members = groups.resolve(group).of(rank)
    here = set(world.current().hosted)
    if here.issuperset(members):
        values = _hosted(tensor)
        return {r: values[r] for r in members}
    if rank not in here:
        raise ValueError(f"rank {rank} is hosted by another process: this one hosts {sorted(here)}")
    if tensor.device.type != "xla":
        local = tensor
        tensor = sharded.from_ranks(lambda r: local, sharded.axes_of(group))
    gathered = functional.all_gather(tensor.unsqueeze(0).contiguous(), 0, group)
    return dict(zip(members, _hosted(gathered)[rank].unbind(), strict=True))


def _check_values(tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise RuntimeError(f"a tensor of shape {list(tensor.shape)} on 'meta' has no values yet: call its layer's init_weight_cpu() first")


def _check_shape(full: torch.Tensor, expected: list[int], parameter: torch.Tensor) -> None:
    if list(full.shape) != expected:
        raise ValueError(
            f"a parameter whose ranks hold {list(parameter.shape)} each has the full shape {expected}, got {list(full.shape)}: "
            "models of another size or parallel degree?"
        )
