"""What a wrapper does before it loads: names, and checks of what cannot be loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torch_bridge.fsdp import live, naming
from torch_bridge.fsdp.shards import Shared
from torch_bridge.mesh import groups as rank_groups
from torch_bridge.mesh import world
from torch_bridge.recorder.rank_tensor import RankTensor
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.recorder.varying import varying

if TYPE_CHECKING:
    from torch_bridge.mesh.groups import GroupLike, Groups


def below(state: dict[str, Any], prefix: str) -> None:
    """In a world of one: entries get the name under which the wrapper holds the module."""
    inner = f"{prefix}{naming.WRAPPED}."
    own = {name: value for name, value in state.items() if name.startswith(prefix)}
    for name, value in own.items():
        del state[name]
        state[inner + name.removeprefix(prefix)] = value


def check(state: dict[str, Any], prefix: str, shared: Sequence[Shared], inside: bool, assign: bool) -> None:
    """Raises ValueError for the state of a whole module, shards of another number of ranks or other options, one rank's shards for several ranks, and
    `load_state_dict(assign=True)`. shared: what the wrapper shares out; inside: whether it, or one inside, does at all."""
    if assign:
        raise ValueError("load_state_dict(assign=True) would put other parameters in the place of shards: leave assign out")
    own = [name for name in state if name.startswith(prefix)]
    if inside and own and not any(naming.unit_and_shard(name) for name in own):
        raise ValueError(
            f"this is the state of a whole module ({own[0]}, ...), a wrapper loads shards: load it into the module before wrapping it"
        )
    entries = {prefix + naming.registered(s.original): s for s in shared}
    for name, s in entries.items():
        value = state.get(name)
        if value is None:  # load_state_dict says so
            continue
        if tuple(value.shape) != s.layout.shape:
            raise ValueError(
                f"{name} is a shard of shape {list(value.shape)}, and here a rank has {list(s.layout.shape)} of {list(s.layout.size)}: it was saved with "
                "another number of ranks or other options. Join the files with consolidate_sharded_model_checkpoints, and load the result before wrapping"
            )
        if is_one_ranks(value):
            raise ValueError(
                f"{name} is one rank's shard, and this process hosts {len(world.current().hosted)} ranks, which have different ones. Load every rank's file: "
                "ckpt = torch_bridge.each_rank(lambda rank: torch.load(path_of(rank)), xm.get_ordinal())"
            )


def is_one_ranks(value: torch.Tensor) -> bool:
    """Whether values for a shard are those of one rank, and this process hosts several: on the CPU, or the same for all on xla (`map_location="xla"`)."""
    if len(world.current().hosted) == 1 or isinstance(value, RankTensor):
        return False
    if not isinstance(value, XLATensor):
        return True
    return not value._storage.constant and not varying(value).axes


def check_not_summed(what: str, grads: Iterable[torch.Tensor], groups: GroupLike) -> None:
    """Before `what` adds up gradients over ranks of `groups`: raises ValueError if these hold different parts of a parameter."""
    given = list(grads)
    mine = world.first()
    for grad, found in zip(given, live.of(given), strict=True):
        among: Groups | None = found or getattr(grad, "_sharded_among", None)
        if among is not None and len(set(among.of(mine)) & set(rank_groups.resolve(groups).of(mine))) > 1:
            raise ValueError(
                f"{what} would add up gradients of different parts of a parameter: XlaFullyShardedDataParallel has averaged gradients already, so call "
                "optimizer.step(). Only ranks that have the same parts (one of each of sharding_groups) may average them again"
            )


def unshared(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of parameters, those of shards of all ranks left out: they are averaged, and no ranks have the same part. Those of shards of `sharding_groups`
    remember it (`check_not_summed`)."""
    found = []
    for p in params:
        among: Groups | None = getattr(p, "_sharded_among", None)
        if p.grad is None or (among is not None and among.size == world.size()):
            continue
        grad: Any = p.grad.data
        if among is not None:
            grad._sharded_among = among
        found.append(grad)
    return found


def is_shard(t: object) -> bool:
    """Whether a tensor is a shard of a wrapper."""
    return isinstance(t, torch.Tensor) and bool(getattr(t, "_is_sharded", False))
