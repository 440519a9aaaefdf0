"""`neuronx_distributed.parallel_layers.parallel_state`: which ranks share tensors, batches, stages, sequences and experts.

Ranks fill a grid [pp, dp, cp, tp], tp innermost; experts see the same ranks as a grid [pp, edp, ep, tp] (cp is folded into edp). Every kind of
group is a process group with `.size()`, `.rank()` and `._mesh` (the ranks of all sister groups), or a list of lists with `as_list=True`. In a
process that hosts several ranks, ranks are `RankInt`s: each rank's own number (see `torch_bridge.mesh.rank_numbers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from nxd_jax.parallel_layers._group_logic import (  # noqa: F401 : names that tests and tools import from here
    ParallelGroups,
    PG_Group_Logic,
    ascending_descending_ring_PG_group,
    ascending_ring_PG_group,
    get_logic_chosen,
)
from nxd_jax.tensor_parallel import kv_groups, parallel_groups, shuffle_groups
from nxd_jax.tensor_parallel.parallel_groups import Lists
from torch_bridge.mesh import rank_numbers, world

_aot_mode = False
parallel_groups.publish_in(globals())

_NAMES = {
    "tp": "tensor model",
    "dp": "data",
    "pp": "pipeline model",
    "cp": "context model",
    "ep": "expert model",
    "edp": "expert data",
}


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    skip_collective_init: bool = False,
    lnc_size: int = 1,
    mesh_only: bool = False,
) -> ParallelGroups | None:
    """Divide the world's ranks into groups. Calling it again divides them anew.

    Sizes above the world size count as the world size. A plain `python script.py` for which nobody set a world size gets one that just holds
    the sizes. mesh_only: return the ranks of all groups and set nothing up. skip_collective_init is accepted: groups need no warm-up here.

    Raises RuntimeError for sizes that do not divide the world, ValueError for sizes below 1, and RuntimeError if torch.distributed has not been
    initialised (not for mesh_only).
    """
    layout = parallel_groups.plan(
        tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size, expert_model_parallel_size
    )
    if mesh_only:
        return ParallelGroups(*(layout.lists[k] for k in ("tp", "dp", "pp", "ep", "edp", "cp")))
    parallel_groups.lay_out(layout, lnc_size)
    return None


def model_parallel_is_initialized() -> bool:
    """Whether `initialize_model_parallel` has been called (and not undone)."""
    return parallel_groups.initialized()


def destroy_model_parallel() -> None:
    """Forget all groups. Process groups stay valid for who holds them; the ranks are data-parallel again."""
    parallel_groups.destroy()


def _named(fn: Callable[..., Any], name: str, text: str) -> Any:
    fn.__name__ = fn.__qualname__ = name
    fn.__doc__ = text
    return fn


def _group_getter(kind: str, name: str) -> Callable[..., Any]:
    text = f"The {_NAMES[kind]} parallel group of this rank: a process group, or with `as_list` the ranks of all such groups."
    return _named(lambda as_list=False: parallel_groups.lists(kind) if as_list else parallel_groups.group(kind), name, text)


def _lists_getter(kind: str, name: str) -> Callable[[], Lists]:
    return _named(lambda: parallel_groups.lists(kind), name, f"The ranks of all {_NAMES[kind]} parallel groups.")


def _size_getter(kind: str, name: str) -> Callable[[], int]:
    text = f"How many ranks are in a {_NAMES[kind]} parallel group."
    return _named(lambda: parallel_groups.size(kind), name, text)


def _rank_getter(kind: str, name: str) -> Callable[[], Any]:
    text = f"This rank's place in its {_NAMES[kind]} parallel group (each rank's own if the process hosts several)."
    return _named(lambda: parallel_groups.rank(kind), name, text)


get_tensor_model_parallel_group = _group_getter("tp", "get_tensor_model_parallel_group")
get_data_parallel_group = _group_getter("dp", "get_data_parallel_group")
get_pipeline_model_parallel_group = _group_getter("pp", "get_pipeline_model_parallel_group")
get_context_model_parallel_group = _group_getter("cp", "get_context_model_parallel_group")
get_expert_model_parallel_group = _group_getter("ep", "get_expert_model_parallel_group")
get_expert_data_parallel_group = _group_getter("edp", "get_expert_data_parallel_group")

get_tensor_model_parallel_replica_groups = _lists_getter("tp", "get_tensor_model_parallel_replica_groups")
get_data_parallel_replica_groups = _lists_getter("dp", "get_data_parallel_replica_groups")
get_pipeline_model_parallel_replica_groups = _lists_getter("pp", "get_pipeline_model_parallel_replica_groups")
get_context_model_parallel_replica_groups = _lists_getter("cp", "get_context_model_parallel_replica_groups")
get_expert_model_parallel_replica_groups = _lists_getter("ep", "get_expert_model_parallel_replica_groups")
get_expert_data_parallel_replica_groups = _lists_getter("edp", "get_expert_data_parallel_replica_groups")

get_tensor_model_parallel_size = _size_getter("tp", "get_tensor_model_parallel_size")
get_data_parallel_size = _size_getter("dp", "get_data_parallel_size")
get_pipeline_model_parallel_size = _size_getter("pp", "get_pipeline_model_parallel_size")
get_context_model_parallel_size = _size_getter("cp", "get_context_model_parallel_size")
get_expert_model_parallel_size = _size_getter("ep", "get_expert_model_parallel_size")
get_expert_data_parallel_size = _size_getter("edp", "get_expert_data_parallel_size")

get_tensor_model_parallel_world_size = get_tensor_model_parallel_size
get_data_parallel_world_size = get_data_parallel_size
"""The names of the releases of 2023."""

get_tensor_model_parallel_rank = _rank_getter("tp", "get_tensor_model_parallel_rank")
get_data_parallel_rank = _rank_getter("dp", "get_data_parallel_rank")
get_pipeline_model_parallel_rank = _rank_getter("pp", "get_pipeline_model_parallel_rank")
get_context_model_parallel_rank = _rank_getter("cp", "get_context_model_parallel_rank")
get_expert_model_parallel_rank = _rank_getter("ep", "get_expert_model_parallel_rank")
get_expert_data_parallel_rank = _rank_getter("edp", "get_expert_data_parallel_rank")


def set_tensor_model_parallel_size(size: int) -> None:
    """Make `get_tensor_model_parallel_size` answer this (tracing for another world)."""
    parallel_groups.current().overrides["tp_size"] = size


def set_tensor_model_parallel_rank(rank: Any) -> None:
    """Make `get_tensor_model_parallel_rank` answer this."""
    parallel_groups.current().overrides["tp_rank"] = rank


def set_expert_model_parallel_size(size: int) -> None:
    """Make `get_expert_model_parallel_size` answer this."""
    parallel_groups.current().overrides["ep_size"] = size


def set_expert_model_parallel_rank(rank: Any) -> None:
    """Make `get_expert_model_parallel_rank` answer this."""
    parallel_groups.current().overrides["ep_rank"] = rank


def set_context_model_parallel_size(size: int) -> None:
    """Make `get_context_model_parallel_size` answer this."""
    parallel_groups.current().overrides["cp_size"] = size


# -- the world, and ranks of others -----------------------------------------------------------------


def get_world_group(as_list: bool = False) -> Any:
    """All ranks as one group."""
    parallel_groups.layout()
    return [list(range(world.size()))] if as_list else dist.group.WORLD


def is_global_rank_zero() -> bool:
    """Whether this is rank 0 of the job."""
    return bool(world.rank() == 0)


def _at(lists: Sequence[Sequence[int]], place: Callable[[Sequence[int], int], int]) -> Any:
    """`place(group, rank)` for each rank and the group it is in."""
    of = {r: group for group in lists for r in group}
    return world.current().table(lambda r: place(of[r], r))


def get_tensor_model_parallel_src_rank() -> Any:
    """The global rank of the first member of this rank's tensor parallel group."""
    return _at(parallel_groups.layout().lists["tp"], lambda group, r: group[0])


def get_data_parallel_src_rank() -> Any:
    """The global rank of the first member of this rank's data parallel group."""
    return _at(parallel_groups.layout().lists["dp"], lambda group, r: group[0])


def get_pipeline_model_parallel_next_rank() -> Any:
    """The global rank of the next pipeline stage (after the last comes the first)."""
    return _at(parallel_groups.layout().lists["pp"], lambda group, r: group[(group.index(r) + 1) % len(group)])


def get_pipeline_model_parallel_prev_rank() -> Any:
    """The global rank of the pipeline stage before this one (before the first comes the last)."""
    return _at(parallel_groups.layout().lists["pp"], lambda group, r: group[(group.index(r) - 1) % len(group)])


def get_context_model_parallel_src_tgt_pairs() -> Lists:
    """[source, target] global ranks of a step around every context parallel ring."""
    return parallel_groups.ring_pairs("cp")


def get_pipeline_model_parallel_sr_group(parity: bool | int | None = None) -> Lists:
    """The ranks of neighbouring stages that send and receive: for parity 0 stages (0, 1), (2, 3), ..., for 1 stages (1, 2), (3, 4), ..., (last, 0).

    `get_next_rank_group` and `get_prev_rank_group` are process groups of them. Raises AssertionError without a parity.
    """
    assert parity is not None, "get_pipeline_model_parallel_sr_group: give the parity of the stages that pairs start at, 0 or 1"
    stages = parallel_groups.layout().lists["pp"]
    return [[group[k], group[(k + 1) % len(group)]] for group in stages for k in range(int(parity), len(group), 2)]


def _neighbour_group(step: int, as_list: bool) -> Any:
    rank = parallel_groups.layout().place("pp", world.first())
    parity = (rank if step > 0 else rank - 1) % 2
    if as_list:
        return get_pipeline_model_parallel_sr_group(parity)
    key = f"sr{parity}"
    if not parallel_groups.is_defined(key):
        size = parallel_groups.layout().size["pp"]
        if size % 2:
            raise RuntimeError(
                f"pipeline send/receive groups of two stages need an even number of stages, pipeline_model_parallel_size is {size}; the "
                "pipeline runtime moves activations between sub-meshes and does not need them"
            )
        parallel_groups.define(key, get_pipeline_model_parallel_sr_group(parity))
    return parallel_groups.group(key)


def get_next_rank_group(as_list: bool = False) -> Any:
    """The send/receive group of the first hosted rank and the next stage, or the ranks of all."""
    return _neighbour_group(1, as_list)


def get_prev_rank_group(as_list: bool = False) -> Any:
    """The send/receive group of the first hosted rank and the stage before, or the ranks of all."""
    return _neighbour_group(-1, as_list)


def get_next_rank_replica_groups() -> Lists:
    """The ranks of all `get_next_rank_group` groups."""
    return get_next_rank_group(as_list=True)


def get_prev_rank_replica_groups() -> Lists:
    """The ranks of all `get_prev_rank_group` groups."""
    return get_prev_rank_group(as_list=True)


get_next_rank_group_replica_groups = get_next_rank_replica_groups
get_prev_rank_group_replica_groups = get_prev_rank_replica_groups
"""Names of earlier versions of this project."""


# -- experts ----------------------------------------------------------------------------------------


def get_expert_parallel_rank_from_global_rank(rank: Any, expert_parallel_group: Any) -> Any:
    """The place of a global rank in its expert parallel group, given that group or the lists of all. Each rank's own for a number that differs by rank."""
    lists = expert_parallel_group._mesh if hasattr(expert_parallel_group, "_mesh") else expert_parallel_group
    places = {member: place for group in lists for place, member in enumerate(group)}
    numbers = rank_numbers.per_rank(rank)
    missing = sorted(set(numbers) - set(places))
    if missing:
        raise ValueError(f"rank {missing[0]} is in none of the expert parallel groups {lists}")
    return world.current().table(lambda r: places[numbers[r]])


def get_experts_for_expert_parallel_rank(
    expert_parallel_rank: Any, total_number_of_experts: int, expert_model_parallel_size: int, expert_distribution: Any = None
) -> Any:
    """The experts that an expert parallel rank holds: equal runs, or `expert_distribution[rank]` where given.

    For `get_expert_model_parallel_rank()` in a process that hosts several ranks they are numbers that differ by rank: `weight[experts]` takes each rank's own.

    Raises ValueError if the experts cannot be divided evenly, for a rank that there is not, and if ranks of one process have different numbers of experts.
    """
    numbers = rank_numbers.per_rank(expert_parallel_rank)
    outside = [n for n in numbers if not 0 <= n < expert_model_parallel_size]
    if outside:
        raise ValueError(
            f"expert parallel rank {outside[0]} is not one of expert_model_parallel_size={expert_model_parallel_size} ranks (0 is the first)"
        )
    if expert_distribution is None:
        if total_number_of_experts % expert_model_parallel_size:
            raise ValueError(
                f"{total_number_of_experts} experts cannot be divided evenly over expert_model_parallel_size={expert_model_parallel_size} ranks"
            )
        per_rank = total_number_of_experts // expert_model_parallel_size
        return [expert_parallel_rank * per_rank + k for k in range(per_rank)]
    if not rank_numbers.is_ranked(expert_parallel_rank):
        return expert_distribution[expert_parallel_rank]
    held = {n: list(expert_distribution[n]) for n in sorted(set(numbers))}
    counts = {n: len(experts) for n, experts in held.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"expert_distribution gives expert parallel ranks different numbers of experts ({counts}), and this process hosts several of them: "
            "give each as many, or start one process per rank with torchrun"
        )
    return [world.current().table([held[n][k] for n in numbers].__getitem__) for k in range(counts[numbers[0]])]


# -- groups within groups -----------------------------------------------------------------------------


def _defined(kind: str, how: str, as_list: bool) -> Any:
    group = parallel_groups.defined(kind, how)
    return [list(g) for g in group._mesh] if as_list else group


def initialize_token_shuffle_group(token_shuffle_group_size: int = 1) -> None:
    """Divide every data parallel group into groups of this size that exchange tokens.

    Raises RuntimeError if it does not divide the data parallel size, AssertionError if there are groups of another size.
    """
    shuffle_groups.initialize(token_shuffle_group_size)


def get_token_shuffle_group(as_list: bool = False) -> Any:
    """The token shuffle group of this rank, or the ranks of all."""
    return shuffle_groups.lists() if as_list else shuffle_groups.group()


def get_token_shuffle_replica_groups() -> Lists:
    """The ranks of all token shuffle groups."""
    return shuffle_groups.lists()


def get_token_shuffle_group_size() -> int:
    """Ranks in a token shuffle group."""
    return len(shuffle_groups.lists()[0])


def destroy_token_shuffle_group() -> None:
    """Forget the token shuffle groups."""
    parallel_groups.forget(shuffle_groups.KIND)


def arrange_kv_groups(
    num_tensor_model_parallel_groups: int = 1,
    tensor_model_parallel_size: int = 1,
    kv_shared_group_size: int = 1,
    sequential_ranks_in_group: bool = False,
    hardware_type: Any = None,
) -> Lists:
    """Groups of `kv_shared_group_size` ranks of a tensor parallel group that hold copies of the same K/V heads.

    Trn1 (default): every tp/kv-th rank, as K/V heads are repeated as a whole; Trn2 and `sequential_ranks_in_group`: neighbouring ranks.
    """
    adjacent = kv_groups.adjacent(hardware_type, sequential_ranks_in_group)
    return kv_groups.arrange(num_tensor_model_parallel_groups, tensor_model_parallel_size, kv_shared_group_size, adjacent)


def initialize_kv_group(kv_shared_group_size: int = 1, sequential_ranks_in_group: bool = False) -> None:
    """Divide every tensor parallel group into groups of ranks that share K/V heads (see `arrange_kv_groups`)."""
    kv_groups.initialize(kv_shared_group_size, sequential_ranks_in_group)


def get_kv_shared_group(as_list: bool = False) -> Any:
    """The group of ranks that hold the same K/V heads as this one, or the ranks of all such groups."""
    return kv_groups.shared(as_list)


def get_kv_shared_replica_groups() -> Lists:
    """The ranks of all K/V groups."""
    return get_kv_shared_group(as_list=True)


def get_kv_shared_group_size() -> int:
    """Ranks that hold copies of the same K/V heads."""
    return len(get_kv_shared_group(as_list=True)[0])


def destroy_kv_group() -> None:
    """Forget the K/V groups."""
    parallel_groups.forget("kv")


def initialize_speculative_draft_group(group_size: int = 1) -> None:
    """Divide every tensor parallel group into groups of `group_size` for a draft model of speculative decoding.

    Raises ValueError if that does not divide the tensor parallel size, AssertionError if there are groups of another size.
    """
    layout = parallel_groups.layout()
    tp = layout.size["tp"]
    if tp % group_size:
        raise ValueError(f"draft_size={group_size} must divide the tensor parallel size {tp}")
    if parallel_groups.is_defined("draft"):
        had = len(get_speculative_draft_replica_groups()[0])
        assert had == group_size, f"draft groups of {had} ranks exist, cannot make groups of {group_size}"
        return
    parallel_groups.define("draft", [group[k : k + group_size] for group in layout.lists["tp"] for k in range(0, tp, group_size)])


def get_speculative_draft_group(as_list: bool = False) -> Any:
    """The draft model's group of this rank, or the ranks of all."""
    return _defined("draft", "initialize_speculative_draft_group(group_size)", as_list)


def get_speculative_draft_replica_groups() -> Lists:
    """The ranks of all draft groups."""
    return get_speculative_draft_group(as_list=True)


def get_zero1_sharding_groups() -> Lists:
    """The ranks that share optimizer state under ZeRO-1: for every stage and tp rank, all its data and context parallel ranks."""
    return parallel_groups.layout().zero1_lists()


# -- other ways to talk --------------------------------------------------------------------------------


def create_pg_with_ranks(ranks: Sequence[int]) -> Any:
    """A process group of these stages of each pipeline (their places in it), for weights that they share.

    Where one of the ranks is no stage, they are global ranks: the group has them and, if they are a line of the mesh, its sisters.
    """
    from torch_bridge.collectives import backend

    layout = parallel_groups.layout()
    if any(r >= layout.size["pp"] for r in ranks):
        return backend.new_xla_process_group(list(ranks), backend="xla")
    others = [k for k in range(layout.size["pp"]) if k not in ranks]
    stages = [list(ranks), *(others[k : k + len(ranks)] for k in range(0, len(others), len(ranks)))]
    return parallel_groups.new_group([[pipeline[k] for k in group] for group in stages for pipeline in layout.lists["pp"]])


def gather_python_object(obj: Any, group: Any = None) -> list[Any]:
    """Every member's Python object, in rank order."""
    found: list[Any] = [None] * (dist.get_world_size(group) if group is not None else world.size())
    dist.all_gather_object(found, obj, group=group)
    return found


def is_tcp_store_available() -> bool:
    """Whether processes can talk through torch's TCP store (under torchrun)."""
    return world.process_count() > 1


def get_tcp_store() -> Any:
    """The key-value store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def initialize_pp_gloo_groups() -> None:
    """Accepted: pipeline stages exchange shapes inside one program here and need no groups on the CPU."""
    parallel_groups.layout()


def get_pp_gloo_group() -> Any:
    """The pipeline group; it carries Python objects too."""
    return get_pipeline_model_parallel_group()


def set_aot_mode(mode: bool) -> None:
    """Remember whether models are being traced ahead of time."""
    global _aot_mode
    _aot_mode = bool(mode)


def get_aot_mode() -> bool:
    """What `set_aot_mode` was told."""
    return _aot_mode


def get_rank_info_str() -> str:
    """The ranks of this worker in every kind of group, for log lines."""
    if not model_parallel_is_initialized():
        return f"rank_{world.rank()}"
    ranks = (get_pipeline_model_parallel_rank(), get_tensor_model_parallel_rank(), get_data_parallel_rank())
    return "rank_{}_pp{}_tp{}_dp{}".format(world.rank(), *ranks)


def rmsg(msg: str) -> str:
    """A message with this worker's ranks in front."""
    return f"[{get_rank_info_str()}] {msg}"


def rmsg_ep(msg: str) -> str:
    """A message with this worker's expert parallel ranks in front."""
    return f"[{get_rank_info_str()}_ep{get_expert_model_parallel_rank()}_edp{get_expert_data_parallel_rank()}] {msg}"
