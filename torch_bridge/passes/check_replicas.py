"""Do ranks that share a parameter still agree? Because every value's axes are known, an update that would let them drift apart is seen.

On real hardware each rank keeps its own copy of a shared parameter; if one rank's update differs (a gradient that nobody reduced), the copies
part silently. Here that is a warning that names the parameter, or an error with `strict`.
"""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from torch_bridge.ir.segment import Segment, Storage
from torch_bridge.mesh import sharding, world

_reported: set[str] = set()


class ReplicaDriftError(RuntimeError):
    """In strict mode: an update differs among ranks that share the parameter."""


def strict() -> bool:
    """Whether drift is an error: NXD_JAX_STRICT_REPLICAS=1."""
    return os.environ.get("NXD_JAX_STRICT_REPLICAS", "0") not in ("", "0")


def own(module: torch.nn.Module, name: str, parameter: Any) -> None:
    """Remember which module a parameter's storage belongs to."""
    storage: Storage | None = getattr(parameter, "_storage", None)
    if storage is not None and isinstance(parameter, torch.nn.Parameter):
        storage.describe(owner=(weakref.ref(module), name, world.layout()))


def _registered(module: torch.nn.Module, name: str, parameter: Any) -> None:
    if parameter is not None:
        own(module, name, parameter)


def install() -> None:
    """Notice parameters made on xla; those moved there come through `modules`."""
    torch.nn.modules.module.register_module_parameter_registration_hook(_registered)


def path_of(storage: Storage) -> str:
    """The dotted path of the parameter that a storage holds, '' if it is none."""
    if storage.facts is None or storage.facts.owner is None:
        return ""
    module, name = storage.facts.owner[0](), storage.facts.owner[1]
    return name if module is None else ".".join([*_place(module), name])


def _place(module: torch.nn.Module) -> list[str]:
    """The names that lead to a module from the outermost one that holds it. Looks at every module alive: for messages only."""
    holders = {
        id(child): (m, name)
        for m in gc.get_objects()
        if issubclass(type(m), torch.nn.Module)  # isinstance would ask every object for its __class__
        for name, child in m.__dict__.get("_modules", {}).items()
        if child is not None
    }
    names: list[str] = []
    while id(module) in holders and len(names) < 100:
        module, name = holders[id(module)]
        names.insert(0, name)
    return names


def check(segment: Segment, axes: dict[int, sharding.Axes]) -> None:
    """Look at every parameter that a program writes: does it vary over axes that the parameter was shared over? axes: of new values, by id."""
    for ref, leaf in segment.saved_with_leaves():
        storage = ref()
        if storage is None or storage.segment is not segment or storage.facts is None or storage.facts.owner is None:
            continue
        before = sharding.axes_of(sharding.spec_of(segment.leaves[-leaf - 1]))
        if storage.spec is not None:
            before |= sharding.axes_of(storage.spec)
        drift = axes.get(storage.vid, sharding.NONE) - before
        if drift and not all_have_another(storage):
            _report(storage, sharding.ordered(drift))


def all_have_another(storage: Storage) -> bool:
    """Whether it is a shard of FSDP, of which every rank has another: a value that is the same for all, such as zeros, is no copy that must stay one."""
    assert storage.facts is not None
    module, name = storage.facts.owner[0](), storage.facts.owner[1]
    among = getattr(None if module is None else module._parameters.get(name), "_sharded_among", None)
    return among is not None and bool(among.size == world.size())


def _report(storage: Storage, axes: tuple[str, ...]) -> None:
    path = path_of(storage)
    if path in _reported and not strict():
        return
    _reported.add(path)
    sizes = world.current().axes
    ranks = ", ".join(f"{sizes[a]} {a} ranks" for a in axes)
    assert storage.facts is not None
    then: Mapping[str, int] = storage.facts.owner[2]
    earlier = len(then) > 1 and dict(then) != dict(world.layout())
    text = (
        f"parameter '{path}' is shared by {ranks}, but its update differs among them, so its copies {_made_then(then) if earlier else _not_reduced(axes)}. "
        "(NXD_JAX_STRICT_REPLICAS=1 makes this an error.)"
    )
    if strict():
        raise ReplicaDriftError(text)
    warnings.warn(text, stacklevel=2)


def _not_reduced(axes: tuple[str, ...]) -> str:
    reduction = {"tp": "allreduce_sequence_parallel_gradients or an all-reduce over the tensor-parallel group"}.get(
        axes[0], "xm.reduce_gradients(optimizer), xm.optimizer_step or bucket_allreduce_gradients"
    )
    return f"drift apart: a gradient was not reduced over {' and '.join(axes)}. Probably missing before optimizer.step(): {reduction}"


def _made_then(layout: Mapping[str, int]) -> str:
    """Of a parameter of an earlier layout, whose layers reduce over the groups of that one: nobody knows whether the ranks get equal data."""
    shown = " x ".join(f"{name} {size}" for name, size in layout.items() if size > 1)
    return (
        f"may drift apart: the ranks were laid out otherwise ({shown or 'one rank'}) when it was made. Its copies stay equal only where these ranks get equal "
        "data. Train it in its own layout (initialize_model_parallel with those sizes), or load its weights into a model that is made in this one"
    )
