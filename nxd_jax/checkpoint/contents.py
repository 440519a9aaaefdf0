"""What a model and an optimizer consist of, for checkpoints: named tensors with their placement, and everything else."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from nxd_jax import _wrapper
from nxd_jax.checkpoint import heads, placement
from nxd_jax.checkpoint.placement import Placement
from nxd_jax.tensor_parallel import expert_shares, expert_states, full_weights
from torch_bridge import nested
from torch_bridge.collectives.row_shards import RowShards
from torch_bridge.mesh import world
from torch_bridge.recorder import copies, sharded

SMALL = 16
"""CPU tensors of up to so many numbers (an optimizer's step) are kept with what is no tensor."""


@dataclasses.dataclass
class Contents:
    """tensors: by name, with the placement of those on xla (None: a CPU tensor, the same for all ranks). other: everything else, nested."""

    tensors: dict[str, tuple[torch.Tensor, Placement | None]]
    other: dict[str, Any]


MEANS = {"row_var": -1, "col_var": -2}
"""State of an optimizer that has one entry along a dim of its parameter, whatever the parameter's size there (Adafactor's)."""

Model = torch.nn.Module | Mapping[str, Any]
"""A module, or a state dict."""


# -- models ------------------------------------------------------------------------------------------


def of_model(model: Model, saving: bool = True) -> Contents:
    """A module's state dict (of adapters, what their configuration says is to be saved), or a state dict."""
    heads.mark(unwrapped(model))
    tensors: dict[str, tuple[torch.Tensor, Placement | None]] = {}
    other: dict[str, Any] = {}
    for name, value in state_of(model, saving).items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value, placed(value)
        else:
            other[name] = value
    return Contents(tensors, {"other": other})


def unwrapped(model: Any) -> Any:
    """The module inside an `NxDModel`."""
    return _wrapper.inner(model)


def state_of(model: Model, saving: bool = True) -> Mapping[str, Any]:
    """The tensors of a model by name, as they are (of adapters, if `saving`, what their configuration says is to be saved)."""
    if isinstance(model, Mapping):
        found: Mapping[str, Any] = every_ranks(model)
        return found
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module or a state dict, got {type(model).__name__}")
    module = unwrapped(model)
    if saving and hasattr(module, "checkpoint_state"):
        return module.checkpoint_state()
    return module.state_dict(keep_vars=True)


def every_ranks(state: Any) -> Any:
    """A state dict, CPU copies of tensors that differ among ranks on xla again, where each rank has its own."""
    found = {id(t): own for t in nested.collect(state, _on_cpu) if (own := copies.kept(t)) is not None}
    return nested.replace(state, lambda x: id(x) in found, list(found.values())) if found else state


def _on_cpu(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "cpu"


def mark_heads(model: Model) -> None:
    """Note on parameters in which order query heads come."""
    heads.mark(unwrapped(model))


def names_of(model: Model | None) -> dict[torch.Tensor, str]:
    """The first name of each parameter of a model."""
    if not isinstance(model, torch.nn.Module):
        return {}
    heads.mark(unwrapped(model))
    found: dict[torch.Tensor, str] = {}
    for name, p in unwrapped(model).named_parameters():
        found.setdefault(p, name)
    return found


def keys_of(name: str, where: Placement | None) -> list[str]:
    """The names of the arrays that a tensor is stored as: fused q, k and v by themselves."""
    if where is None or len(where.pieces) == 1:
        return [name]
    return [name.removesuffix("_qkv") + piece.suffix for piece in where.pieces]


def placed(t: torch.Tensor) -> Placement | None:
    """How an xla tensor lies among the ranks; None for a CPU tensor."""
    if t.device.type != "xla":
        return None
    expected = {a for axes in full_weights.cuts_of(t).values() for a in axes}
    axes = set(sharded.varying(t).axes)
    if axes <= expected or _agree(t):
        return placement.of(t)
    return placement.apart(t.shape, _places(axes))


def _agree(t: torch.Tensor, parts: Sequence[object] | None = None) -> bool:
    """Whether ranks hold the same bits although nobody could tell from the program. parts: which part each rank holds; those with the same one are compared."""
    firsts: dict[object, torch.Tensor] = {}
    found = sharded.shards(t)
    same = all(torch.equal(firsts.setdefault(None if parts is None else parts[r], own), own) for r, own in enumerate(found))
    return same and len(world.current().hosted) == world.size()


def _places(axes: Iterable[str]) -> list[int]:
    """For each rank the number of its place along some mesh axes."""
    tables = [world.coordinates(a) for a in axes]
    keys = [tuple(t[r] for t in tables) for r in range(world.size())]
    order = {key: k for k, key in enumerate(sorted(set(keys)))}
    return [order[key] for key in keys]


# -- optimizers --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Part:
    """A parameter of an optimizer and what the optimizer works on in its place: itself, or this rank's rows of it. rows: how it is cut."""

    name: str
    parameter: torch.Tensor
    held: torch.Tensor
    rows: RowShards | None

    def placement(self) -> Placement:
        return placement.of(self.parameter, self.rows)

    def shape(self) -> torch.Size:
        return self.held.shape

    def reduced(self, kind: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The dims along which state of this shape has one entry, and the parameter any number."""
        held = self.held.shape
        if len(shape) != len(held):
            return ()
        if kind in MEANS and len(held) > 1:
            return (MEANS[kind] % len(held),)
        return tuple(d for d, (n, whole) in enumerate(zip(shape, held, strict=True)) if n == 1 != whole)


def inner(optimizer: Any) -> Any:
    """The optimizer inside an `NxDOptimizer`."""
    return _wrapper.inner(optimizer)


def is_zero1(optimizer: Any) -> bool:
    from torch_bridge.optimizers.zero1 import ZeroRedundancyOptimizer

    return isinstance(inner(optimizer), ZeroRedundancyOptimizer)


def stepping(optimizer: Any) -> Any:
    """The optimizer whose `state` is by what it works on."""
    found = inner(optimizer)
    if not is_zero1(found):
        return found
    found.prepare()
    return found.base_optimizer


def parts_of(optimizer: Any, names: Mapping[torch.Tensor, str]) -> list[Part]:
    """The parameters of an optimizer in order; those without a name are called by their number."""
    found = inner(optimizer)
    parts = []
    zero1 = is_zero1(found)
    if zero1:
        found.prepare()
    for k, p in enumerate(p for group in found.param_groups for p in group["params"]):
        held, rows = (found.shard_of[p], found.shards_of(p)) if zero1 else (p, None)
        parts.append(Part(names.get(p, str(k)), p, held, rows))
    return parts


def of_optimizer(optimizer: torch.optim.Optimizer, parts: Sequence[Part]) -> Contents:
    """State by parameter, options of groups, and the master weights of ZeRO-1 where they are more than the weights."""
    outer, base = inner(optimizer), stepping(optimizer)
    if is_zero1(outer):
        outer.take_writes()
    states = [base.state.get(part.held, {}) for part in parts]
    masters = {
        part.name: part.held
        for part in parts
        if part.held is not part.parameter and (outer.save_master_weights or part.held.dtype != part.parameter.dtype)
    }
    return _of_states(parts, states, masters, outer.param_groups, type(base).__name__)


def state_dtype(optimizer: Any, held: torch.Tensor, stored: torch.dtype, updated: torch.dtype | None) -> torch.dtype:
    """The dtype of state that an optimizer loads: that of what it updates where the state had it so when it was saved, and for torch's optimizers, which keep
    all state in it. Other state keeps its own.

    held: what the optimizer updates now; updated: the dtype of what was updated then, if that is known. An optimizer with a method `state_dtype(held)` says it
    itself.
    """
    if not stored.is_floating_point:
        return stored
    if hasattr(optimizer, "state_dtype"):
        own: torch.dtype = optimizer.state_dtype(held)
        return own
    follows = stored == updated or type(optimizer).__module__.startswith("torch.optim.")
    return held.dtype if follows else stored


def are_experts(optimizer: Any) -> list[list[bool]]:
    """For each group of an optimizer, for each parameter: whether expert-parallel ranks have different experts of it."""
    return [[expert_shares.is_shared_out(p) for p in group["params"]] for group in inner(optimizer).param_groups]


def plain_state(optimizer: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state dict of an optimizer that numbers all its parameters group by group (`NeuronEPZero1Optimizer` has experts by themselves)."""
    return expert_states.plain(state, are_experts(optimizer)) if expert_states.is_combined(state) else state


def of_zero1_state(state: Mapping[str, Any], parts: Sequence[Part], kind: str) -> Contents:
    """The same of a ZeRO-1 optimizer's state dict (`plain_state`); its tensors may be on the CPU. kind: the class of the optimizer inside.

    Raises ValueError for the state of other parameters, and for tensors on the CPU that do not tell what each rank had.
    """
    shapes = [tuple(s) for s in state["shape_info"].values()]
    if shapes != [tuple(part.parameter.shape) for part in parts]:
        raise ValueError(
            f"the state is of {len(shapes)} parameters, and not of the {len(parts)} of the optimizer that aux_infos were made of"
        )
    base, master = state["base_state"], state.get("sharded_master_weights") or {}
    states = [{key: _on_device(f"{key}/{part.name}", v, part) for key, v in base.get(k, {}).items()} for k, part in enumerate(parts)]
    masters = {part.name: _on_device(f"master/{part.name}", master[k], part) for k, part in enumerate(parts) if k in master}
    return _of_states(parts, states, masters, state["param_groups"], kind)


def _on_device(label: str, value: object, part: Part) -> Any:
    """A tensor as every rank had it; numbers stay where they are."""
    if not isinstance(value, torch.Tensor) or value.device.type == "xla" or value.dim() == 0:
        return value
    found = value.to("xla")
    cut = part.rows is not None and part.rows.size > 1
    if (cut or full_weights.is_divided(part.parameter)) and value.shape == part.shape() and not sharded.varying(found).axes:
        raise ValueError(
            f"{label} on the CPU is rank 0's, and ranks have different ones: it was changed or copied after it was read. Give optimizer.state_dict() itself, "
            "or what move_all_tensor_to_cpu made of it"
        )
    return found


def _of_states(
    parts: Sequence[Part],
    states: Sequence[Mapping[str, Any]],
    masters: Mapping[str, torch.Tensor],
    param_groups: Sequence[Mapping[str, Any]],
    kind: str,
) -> Contents:
    tensors: dict[str, tuple[torch.Tensor, Placement | None]] = {}
    plain: dict[str, dict[str, Any]] = {}
    for part, state in zip(parts, states, strict=True):
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                plain.setdefault(part.name, {})[key] = value
            elif _is_number(value) and (key == "step" or value.shape != part.shape()):
                plain.setdefault(part.name, {})[key] = value.detach().cpu()
            else:
                tensors[f"{key}/{part.name}"] = value, _state_placement(key, value, part)
        if part.name in masters:
            tensors[f"master/{part.name}"] = masters[part.name], part.placement()
    groups, k = [], 0
    for group in param_groups:
        count = len(group["params"])
        groups.append({**{o: v for o, v in group.items() if o != "params"}, "params": [part.name for part in parts[k : k + count]]})
        k += count
    dtypes = {part.name: str(part.held.dtype).removeprefix("torch.") for part in parts}
    order = [part.name for part in parts]
    other = {"state": plain, "param_groups": groups, "master": list(masters), "class": kind, "order": order, "dtypes": dtypes}
    return Contents(tensors, other)


def _is_number(t: torch.Tensor) -> bool:
    return t.numel() <= 1 and (t.device.type != "xla" or not sharded.varying(t).axes)


def _state_placement(kind: str, value: torch.Tensor, part: Part) -> Placement | None:
    if value.device.type != "xla":
        return None
    dims = part.reduced(kind, value.shape)
    if value.shape == part.shape() and not dims:
        return part.placement()
    axes = sharded.varying(value).axes
    if dims and value.shape == _of_reduced(part, dims):
        where = placement.reduced(part.placement(), dims)
        if set(axes) <= where.axes() or _agree(value, where.parts()):
            return where
    return placement.apart(value.shape, _places(axes)) if axes and not _agree(value) else placement.everywhere(value.shape)


def _of_reduced(part: Part, dims: Sequence[int]) -> torch.Size:
    return torch.Size(1 if d in dims else n for d, n in enumerate(part.shape()))
