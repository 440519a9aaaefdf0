"""State dicts of ZeRO-1 optimizers with experts, as NxD numbers them: those of two optimizers, one for experts and one for everything else, in one dict.

"Plain" is the numbering of every other optimizer, of all parameters group by group. NxD's has each group twice, first without experts, then with nothing else;
both count their parameters from 0. In what is kept by parameter, experts' numbers begin at an offset, which the dict says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

OFFSETS = ("ep_param_id_offset", "ep_param_group_offset", "ep_base_state_offset", "ep_shape_info_offset")
_KEPT = {"state": "ep_param_id_offset", "base_state": "ep_base_state_offset", "shape_info": "ep_shape_info_offset"}
MASTERS = "sharded_master_weights"

Flags = Sequence[Sequence[bool]]
"""For each group, for each of its parameters: whether it is one of experts."""


def is_combined(state: object) -> bool:
    """Whether a state dict is numbered as NxD does with experts."""
    return isinstance(state, Mapping) and any(key in state for key in OFFSETS)


def combined(state: Mapping[str, Any], flags: Flags) -> dict[str, Any]:
    """A plain state dict in NxD's numbers. Master weights, which NxD leaves out, have those of `shape_info`."""
    others, experts = _numbers(flags)
    first = {old: new for new, old in enumerate(others)}
    then = {old: new for new, old in enumerate(experts)}
    groups = [_renumbered(group, own, first, False) for group, own in zip(state["param_groups"], flags, strict=True)]
    found: dict[str, Any] = {"ep_param_group_offset": len(groups)}
    groups += [_renumbered(group, own, then, True) for group, own in zip(state["param_groups"], flags, strict=True)]
    found["param_groups"] = groups
    for key, name in _KEPT.items():
        kept = state.get(key, {})
        found[key] = {first[old]: value for old, value in kept.items() if old in first}
        found[name] = max(found[key], default=0) + 1
        found[key].update({found[name] + then[old]: value for old, value in kept.items() if old in then})
    if MASTERS in state:
        start = found["ep_shape_info_offset"]
        found[MASTERS] = {first[old] if old in first else start + then[old]: value for old, value in state[MASTERS].items()}
    return {**{key: value for key, value in state.items() if key not in found}, **found}


def plain(state: Mapping[str, Any], flags: Flags) -> dict[str, Any]:
    """A state dict in NxD's numbers as a plain one. flags: of the optimizer that is to load it.

    Raises ValueError without the offsets, and for groups of other numbers of parameters.
    """
    missing = [key for key in OFFSETS if key not in state]
    if missing:
        raise ValueError(
            f"the state is not of a ZeRO-1 optimizer with expert parallelism: it has no {', '.join(missing)}, only {', '.join(map(str, state))}. "
            "neuronx_distributed's load_checkpoint loads the states of any optimizer"
        )
    count = state["ep_param_group_offset"]
    sides = [[len(group["params"]) for group in own] for own in (state["param_groups"][:count], state["param_groups"][count:])]
    needed = [[sum(flag is side for flag in own) for own in flags] for side in (False, True)]
    if sides != needed:
        raise ValueError(
            f"the state is of groups of {sides[0]} parameters and {sides[1]} of experts, there are groups of {needed[0]} and {needed[1]} of experts here: the "
            "optimizer must get the same groups of the same parameters in the same order"
        )
    others, experts = _numbers(flags)
    found = {key: value for key, value in state.items() if key not in OFFSETS}
    starts = {key: state[name] for key, name in _KEPT.items()}
    for key, start in {**starts, MASTERS: starts["shape_info"]}.items():
        if key in state:
            found[key] = dict(sorted((others[n] if n < start else experts[n - start], value) for n, value in state[key].items()))
    numbers = iter(range(len(others) + len(experts)))
    found["param_groups"] = [
        {**group, "params": [next(numbers) for _ in own]} for group, own in zip(state["param_groups"][:count], flags, strict=True)
    ]
    return found


def _numbers(flags: Flags) -> tuple[list[int], list[int]]:
    """The plain numbers of parameters without experts, and of experts."""
    every = [flag for own in flags for flag in own]
    return [n for n, flag in enumerate(every) if not flag], [n for n, flag in enumerate(every) if flag]


def _renumbered(group: Mapping[str, Any], own: Sequence[bool], new: Mapping[int, int], experts: bool) -> dict[str, Any]:
    """A group with the parameters of one kind."""
    return {**group, "params": [new[old] for old, flag in zip(group["params"], own, strict=True) if flag is experts]}
