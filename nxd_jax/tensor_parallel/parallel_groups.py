"""Which ranks share tensors, batches, stages, sequences and experts: the groups of every kind that this process works in.

Ranks fill a grid [pp, dp, cp, tp], tp innermost; experts see the same ranks as a grid [pp, edp, ep, tp] (cp is folded into edp). Kinds are `grid.KINDS`,
and what `define` adds. `parallel_layers.parallel_state` has the names that scripts ask by.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

import torch_bridge.torch_xla  # noqa: F401 : prepares the environment, and registers backend "xla" for scripts that import no torch_xla
from nxd_jax.tensor_parallel import grid
from torch_bridge.collectives import backend
from torch_bridge.mesh import world

logger = logging.getLogger("nxd_jax")

world.provision(64)  # a plain script says how many ranks it wants only in initialize_model_parallel, perhaps after its first tensors

Lists = list[list[int]]


class NotInitializedError(RuntimeError, AssertionError):
    """Groups that nobody has made are asked for. NxD asserts here; scripts and tests catch either."""


class State:
    """What `lay_out` set up; one object so that `destroy` forgets everything. overrides: sizes and ranks that scripts set, by "tp_size", "tp_rank".
    unasked: "groups" if a layer set up groups of one because nobody had, "process group" if it began torch.distributed as well; else ""."""

    def __init__(self) -> None:
        self.layout: grid.Grid | None = None
        self.groups: dict[str, Any] = {}
        self.overrides: dict[str, Any] = {}
        self.lnc_size = 1
        self.unasked = ""


_state = State()
_laid_out: list[State] = []
"""All that `lay_out` has set up, for scripts that put an earlier one back (`_follow`)."""
_globals: dict[str, Any] = {}
"""The namespace in which NxD's code finds its state as private globals (`publish_in`)."""
_PRIVATE = {
    "tp": ("_TENSOR_MODEL_PARALLEL_GROUP", "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE", "_MPU_TENSOR_MODEL_PARALLEL_RANK"),
    "pp": ("_PIPELINE_MODEL_PARALLEL_GROUP",),
    "dp": ("_DATA_PARALLEL_GROUP",),
    "cp": ("_CONTEXT_PARALLEL_GROUP",),
    "ep": ("_EXPERT_MODEL_PARALLEL_GROUP", "_MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE", "_MPU_EXPERT_MODEL_PARALLEL_RANK"),
    "edp": ("_EXP_DATA_PARALLEL_GROUP",),
    "token_shuffle": ("_TOKEN_SHUFFLE_GROUP", "_TOKEN_SHUFFLE_GROUP_SIZE"),
    "kv": ("_KV_SHARED_GROUP", "_KV_SHARED_GROUP_SIZE"),
}
_OTHERS = (
    "_PIPELINE_GLOBAL_RANKS",
    "_NEXT_RANK_GROUP",
    "_NEXT_RANK_GROUP_SPMD",
    "_PREV_RANK_GROUP",
    "_PREV_RANK_GROUP_SPMD",
    "PP_GROUP_PG_GLOO",
)
_MARK = "_TENSOR_MODEL_PARALLEL_GROUP"


def publish_in(namespace: dict[str, Any]) -> None:
    """Keep NxD's private globals (groups, their ranks as `..._SPMD`, sizes) in a namespace. Tests of NxD's save them, and put them back to change layouts."""
    global _globals
    _globals = namespace
    _publish()


def _publish() -> None:
    for kind, (name, *others) in _PRIVATE.items():
        found = _state.groups.get(kind)
        _globals[name], _globals[f"{name}_SPMD"] = found, None if found is None else found._mesh
        for other in others:
            _globals[other] = None if found is None or other.endswith("RANK") else len(found._mesh[0])
    _globals.update(dict.fromkeys(_OTHERS))


def _follow() -> None:
    """If a script has put the globals of an earlier layout back, go back to that."""
    global _state
    found = _globals.get(_MARK)
    if found is _state.groups.get("tp") or not _globals:
        return
    state = next((s for s in _laid_out if s.groups.get("tp") is found), None)
    if state is None or state.layout is None:
        raise RuntimeError(
            f"parallel_state.{_MARK} was set to {found!r}, which is no group that was set up here: call initialize_model_parallel(...)"
        )
    put_back = {kind: _globals.get(name) for kind, (name, *_) in _PRIVATE.items()}
    state.groups.update({kind: group for kind, group in put_back.items() if group is not None})
    _state = state
    world.set_axes(state.layout.axes, state.layout.order)
    backend.refresh()
    _publish()


def plan(tensor: int = 1, pipeline: int = 1, context: int = 1, expert: int = 1) -> grid.Grid:
    """The grid of the world's ranks for these sizes; those above the world size count as the world size.

    A plain `python script.py` for which nobody set a world size gets one that just holds them. Raises RuntimeError for sizes that do not divide the world,
    ValueError for sizes below 1.
    """
    sizes = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "context_parallel_size": context,
        "expert_model_parallel_size": expert,
    }
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a positive number, got {size!r}")
    world.require(tensor * pipeline * max(context, expert))
    tp, pp, cp, ep = (min(size, world.size()) for size in sizes.values())
    return grid.Grid(world.size(), tp, pp, cp, ep)


def lay_out(layout: grid.Grid, lnc_size: int = 1) -> None:
    """Divide the world's ranks into groups; what was laid out before is forgotten. Raises RuntimeError before torch.distributed is initialised."""
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialized: call torch.distributed.init_process_group('xla') before initialize_model_parallel"
        )
    destroy()
    world.set_axes(layout.axes, layout.order)
    backend.refresh()
    _state.layout = layout
    _state.lnc_size = lnc_size
    for remark in layout.remarks:
        logger.warning("%s", remark)
    for kind, members in layout.lists.items():
        define(kind, members)
    _laid_out[:] = [*_laid_out[-31:], _state]
    logger.info("%d ranks: %s", world.size(), ", ".join(f"{kind} {layout.size[kind]}" for kind in ("tp", "pp", "dp", "cp", "ep")))


def get_local_world_size() -> int:
    """Ranks on this host."""
    return world.local_size()


def current() -> State:
    """What is set up now."""
    return _state


def initialized() -> bool:
    """Whether ranks are laid out."""
    return _state.layout is not None


def destroy() -> None:
    """Forget all groups. Process groups stay valid for who holds them; the ranks are data-parallel again."""
    global _state
    if _state.layout is not None:
        world.set_axes({"dp": world.size()})
    _state = State()
    _publish()


def forget_unasked() -> None:
    """Forget groups of one that a layer set up because nobody had (a reference on the CPU, say), and end torch.distributed if it began that."""
    unasked = _state.unasked
    if unasked:
        destroy()
    if unasked == "process group" and dist.is_initialized():
        dist.destroy_process_group()


def layout() -> grid.Grid:
    """The grid of ranks. Raises NotInitializedError if there is none."""
    _follow()
    if _state.layout is None:
        raise NotInitializedError(
            "model parallel groups are not initialized: call neuronx_distributed.parallel_layers.parallel_state.initialize_model_parallel("
            "tensor_model_parallel_size=...) first, after torch.distributed.init_process_group('xla')"
        )
    return _state.layout


def group(kind: str) -> Any:
    """The process group of a kind that this rank is in."""
    layout()
    return _state.groups[kind]


def lists(kind: str) -> Lists:
    """The ranks of all groups of a kind."""
    known = layout().lists
    return [list(g) for g in (known[kind] if kind in known else _state.groups[kind]._mesh)]


def size(kind: str) -> int:
    """Ranks in a group of a kind."""
    return _state.overrides.get(f"{kind}_size") or layout().size[kind]


def rank(kind: str) -> Any:
    """This rank's place in its group of a kind: an int, or each rank's own if the process hosts several."""
    override = _state.overrides.get(f"{kind}_rank")
    return group(kind).rank() if override is None else override


def places(kind: str) -> dict[int, int]:
    """Every rank's place in its group of a kind."""
    return {r: k for members in lists(kind) for k, r in enumerate(members)}


# -- groups within groups -----------------------------------------------------------------------------


def new_group(members: Lists) -> Any:
    """A process group: the one of these lists, which are its sisters, that this rank is in."""
    mine = next(group for group in members if world.first() in group)
    return backend.new_xla_process_group(mine, backend="xla", pg_options={"xla_pg_options": {"mesh": members}})


def define(kind: str, members: Lists) -> None:
    """Add groups of a kind."""
    _state.groups[kind] = new_group(members)
    _publish()


def is_defined(kind: str) -> bool:
    """Whether there are groups of a kind."""
    return kind in _state.groups


def defined(kind: str, how: str) -> Any:
    """The group of a kind that `define` added. Raises NotInitializedError, saying how to do so, if none did."""
    layout()
    if kind not in _state.groups:
        raise NotInitializedError(f"these groups are not initialized: call parallel_state.{how} first")
    return _state.groups[kind]


def forget(kind: str) -> None:
    """Forget groups that `define` added."""
    _state.groups.pop(kind, None)
    _publish()


def ring_pairs(kind: str) -> Lists:
    """[source, target] global ranks of a step around every ring of a kind."""
    return [[a, b] for members in layout().lists[kind] for a, b in _neighbours(members)]


def _neighbours(members: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(members, [*members[1:], members[0]], strict=True))
