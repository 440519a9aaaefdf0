"""The state of a torch optimizer as that of an optax chain, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from torch_bridge import _compat
from torch_bridge.export.optax_names import Parameter
from torch_bridge.export.optax_rules import Kind
from torch_bridge.runtime import transfer

Held = dict[str, Any]
"""What torch keeps for a parameter."""


class GroupState(NamedTuple):
    """steps: how many each parameter has made, in the order of their names. chains: what optax's chain for each dtype keeps, by parameter name."""

    steps: jax.Array
    chains: dict[str, Any]


class State(NamedTuple):
    """The state of what `to_optax` gives. count: the optimizer's steps, by which the scheduler's numbers are found. groups: as in `param_groups`."""

    count: jax.Array  # type: ignore[assignment]  # optax's word for it
    groups: tuple[GroupState, ...]


def steps_of(held: Held) -> int:
    """How many steps a parameter has made; torch's SGD knows only whether there was one."""
    if "step" in held:
        return int(held["step"])
    return int(held.get("momentum_buffer") is not None)


def filled(chains: Any, kind: Kind, held: dict[str, Held]) -> Any:
    """Chains' first states with torch's values in it. held: by parameter; those without a step stay as they are."""

    def value(path: Sequence[Any], first: Any) -> Any:
        key, name = _key(path, kind)
        own = held.get(name, {})
        if not steps_of(own):
            return first
        if own.get(key) is None:
            raise ValueError(
                f"the torch optimizer's state of {name} has {sorted(own)} and lacks {key}: was an option changed after its first step?"
            )
        return array(own[key])

    return jax.tree_util.tree_map_with_path(value, chains)


def array(t: torch.Tensor) -> jax.Array:
    """A tensor's values, on whichever device it is; 64-bit numbers narrowed as the caller's JAX has them."""
    host = t.detach().cpu()
    return transfer.to_array(host.float() if host.dtype == torch.float64 and not _compat.x64_enabled() else host)


def held(parameter: Parameter, name: str, kind: Kind, step: int, chains: Any) -> Held:
    """What torch keeps for a parameter after this many steps: CPU tensors of the parameter's dtype."""
    if not step:
        return {}
    found: Held = {"step": torch.tensor(float(step))} if kind.counts else {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(chains):
        key, of = _key(path, kind)
        if of == name:
            found[key] = transfer.from_numpy(np.array(leaf)).to(parameter.tensor.dtype)
    return found


def plain(state: Any) -> Any:
    """The state inside of an `nnx.Optimizer`'s; any other as it is."""
    leaves = jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "get_value"))
    if not any(hasattr(x, "get_value") for x in leaves):
        return state
    return jax.tree.map(lambda x: x.get_value() if hasattr(x, "get_value") else x, state, is_leaf=lambda x: hasattr(x, "get_value"))


def _key(path: Sequence[Any], kind: Kind) -> tuple[str, str]:
    """torch's name of a moment, and the parameter's: the last two parts of a leaf's path."""
    moment, name = path[-2:]
    own = getattr(moment, "name", None) or moment.key
    return kind.states.get(own, own), name.key
