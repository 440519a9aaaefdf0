"""Whose memory a tensor's is: parameters, buffers, gradients, optimizer state, found among the modules and optimizers of this process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from torch_bridge.recorder.tensor import XLATensor

KINDS = ("parameter", "buffer", "gradient", "master weight", "optimizer state", "input", "result")
"""In the order in which pictures stack them. "master weight": what an optimizer updates that is no parameter of a module. "input" and "result": all else."""


class Owner(NamedTuple):
    """kind: one of `KINDS`. name: the parameter's path, "exp_avg of layers.0.weight", or ''."""

    kind: str
    name: str = ""


def owners() -> dict[int, Owner]:
    """Whose every storage is, by its id. Looks at all modules and optimizers that are alive; of several paths to a parameter the longest is its name."""
    return {key: owner for key, (owner, _) in owned().items()}


def owned() -> dict[int, tuple[Owner, XLATensor]]:
    """`owners` with a tensor of each storage."""
    objects = gc.get_objects()
    modules = [m for m in objects if issubclass(type(m), torch.nn.Module) and "_parameters" in vars(m)]  # others are being made
    optimizers = [o for o in objects if issubclass(type(o), torch.optim.Optimizer) and {"param_groups", "state"} <= vars(o).keys()]
    names = _names(modules)
    for optimizer in optimizers:  # ZeRO-1: a rank's part of a parameter has its name
        for p, shard in getattr(optimizer, "shard_of", {}).items():
            names[id(shard)] = names.get(id(p), "")
    found: dict[int, tuple[Owner, XLATensor]] = {}
    for t, owner, of in _all(modules, optimizers, names):
        known, _ = found.get(id(t._storage), (None, None))
        if known is None or (known.kind == owner.kind and len(of) > len(known.name)):
            found[id(t._storage)] = owner, t
    return found


def _whole(named: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> list[tuple[str, torch.Tensor]]:
    """Tensors by name; none of a module of which a part is being made."""
    try:
        return list(named())
    except AttributeError:
        return []


def _names(modules: list[torch.nn.Module]) -> dict[int, str]:
    """The longest path of each parameter, by its id."""
    names: dict[int, str] = {}
    for module in modules:
        for name, p in _whole(module.named_parameters):
            names[id(p)] = max(names.get(id(p), ""), name, key=len)
    return names


def _all(
    modules: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer], names: dict[int, str]
) -> Iterator[tuple[XLATensor, Owner, str]]:
    for module in modules:
        for p in module._parameters.values():
            if p is not None:
                name = names.get(id(p), "")
                yield from _one(p, Owner("parameter", name), name)
                yield from _one(p.grad, Owner("gradient", name), name)
                yield from _one(getattr(p, "main_grad", None), Owner("gradient", name), name)
        for name, b in _whole(module.named_buffers):
            yield from _one(b, Owner("buffer", name), name)
    for optimizer in optimizers:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            name = names.get(id(p), "")
            yield from _one(p, Owner("master weight", name), name)
            yield from _one(p.grad, Owner("gradient", name), name)
            state = optimizer.state.get(p)
            for key, value in state.items() if isinstance(state, dict) else ():
                yield from _one(value, Owner("optimizer state", f"{key} of {name}" if name else str(key)), name)


def _one(t: object, owner: Owner, name: str) -> Iterator[tuple[XLATensor, Owner, str]]:
    if isinstance(t, XLATensor):
        yield t, owner, name
