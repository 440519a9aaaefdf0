"""Weights of stages: on which cores they lie, and those that several stages use."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from nxd_jax.pipeline.elsewhere import Elsewhere
from nxd_jax.pipeline.exchange import Exchange
from nxd_jax.pipeline.manual_pipe_stage import SHARED
from nxd_jax.pipeline.runtime import Replica
from nxd_jax.pipeline.stages import Stage, Stages
from torch_bridge.identity import same
from torch_bridge.mesh import messages
from torch_bridge.mesh.places import Place
from torch_bridge.recorder import placed
from torch_bridge.runtime import executor

logger = logging.getLogger("nxd_jax")

Homes = Sequence[Place | None]


def check(stages: Stages) -> None:
    """Warn of stages without parameters, and of running statistics that several stages write."""
    owner: dict[int, int] = {}
    for stage in stages:
        if next(stage.module.parameters(), None) is None:
            logger.warning("stage %d of the pipeline has no parameters: cut the model elsewhere to give it work", stage.index)
        for name, module in stage.module.named_modules():
            if not isinstance(module, _NormBase) or module.running_mean is None:
                continue
            first = owner.setdefault(id(module.running_mean), stage.index)
            if first != stage.index:
                logger.warning(
                    "stages %d and %d of the pipeline have the same %s (%s): the order in which they update its running statistics is the schedule's. "
                    "Give each layer a module of its own, or track_running_stats=False",
                    first,
                    stage.index,
                    type(module).__name__,
                    name,
                )


def _holders(stage: Stage) -> Iterator[tuple[nn.Parameter, nn.Module, str]]:
    """Each parameter of a stage with the modules that have it."""
    for module in stage.module.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield parameter, module, name


Copies = dict[tuple[str, Place], nn.Parameter]
"""Copies of weights at other places than their own, by the weight's name."""


def place(stages: Stages, homes: Homes, copies: Copies, names: Mapping[int, str]) -> None:
    """Move each parameter to the place of the first stage that uses it, and give other stages copies (`Stages.replicas`).

    copies: those there are, extended. names: of parameters in the model, by `id`. What lies with other processes alone stays as it is.
    """
    owner: dict[int, int] = {}
    replicas: list[list[Replica]] = [[] for _ in stages]
    for stage in stages:
        home = homes[stage.index]
        found: dict[int, Replica] = {}
        for parameter, module, name in _holders(stage):
            first = owner.setdefault(id(parameter), stage.index)
            if home is None:
                continue
            if first == stage.index:
                if messages.hosted(home):
                    placed.move_(parameter, home)
            elif homes[first] != home:
                known = found.setdefault(id(parameter), Replica(parameter, None, [], names[id(parameter)], first, stage.index))
                known.holders.append((module, name))
        replicas[stage.index] = [_with_copy(replica, home, copies) for replica in found.values()]
    stages.replicas = replicas
    stages.placed = [parameter for stage in stages for parameter, _, _ in _holders(stage)]


def are_others(stages: Stages, here: Sequence[bool], elsewhere: Elsewhere) -> bool:
    """Whether modules of the stages have other parameters than when these were placed: somebody tied weights, or gave a module another weight.

    here: by stage, whether this process has a part of it. Where others have some, only weights that several stages use count. elsewhere: those that were
    taken out.
    """
    if all(here):
        now = [parameter for stage in stages for parameter, _, _ in _holders(stage)]
        return len(now) != len(stages.placed) or not same(now, stages.placed)
    mine = [replica for found in stages.replicas or () for replica in found if here[replica.reader]]
    held = ((replica.weight, module._parameters[name]) for replica in mine for module, name in replica.holders)
    return any(elsewhere.was_replaced(r.weight) for r in mine) or any(found is not None and found is not weight for weight, found in held)


def _with_copy(replica: Replica, home: Place | None, copies: Copies) -> Replica:
    if home is None or not messages.hosted(home):
        return replica
    known = copies.get((replica.name, home))
    if known is None or (known.shape, known.dtype) != (replica.weight.shape, replica.weight.dtype):
        copies[replica.name, home] = _copy(replica.weight, home)
    return replica._replace(copy=copies[replica.name, home])


def _copy(weight: nn.Parameter, home: Place) -> nn.Parameter:
    copy = nn.Parameter(placed.moved(weight, home), weight.requires_grad)
    copy.__dict__.update({key: value for key, value in weight.__dict__.items() if not key.startswith("_")})
    return copy


def put_back(stages: Stages, homes: Homes) -> None:
    """Move weights to their places that lie elsewhere now, because a checkpoint was loaded, say."""
    seen: set[int] = set()
    for stage in stages:
        home = homes[stage.index]
        if home is None or not messages.hosted(home):
            continue
        for parameter in stage.module.parameters():
            if id(parameter) not in seen and placed.place_of(parameter) != home:
                placed.move_(parameter, home)
            seen.add(id(parameter))


def refresh(replicas: Sequence[Sequence[Replica]], homes: Homes, exchange: Exchange | None) -> None:
    """Give copies the values that the weights have now, freeze those of frozen weights, and forget gradients of a step that did not end: `zero_grad` of an
    optimizer does not reach them."""
    for replica in (r for found in replicas for r in found):
        source, target = ends(replica, homes)
        if replica.copy is not None:
            replica.copy.grad = None
        apart = exchange if exchange is not None and not messages.within_process(source, target) else None
        learns = replica.weight.requires_grad
        if apart is not None:  # only the owner's process knows whether it has been frozen
            learns = apart.told(f"R {replica.name} {replica.reader}", b"1" if learns else b"0", source, target) == b"1"
        if replica.copy is not None:
            replica.copy.requires_grad_(learns)
        if apart is None:
            assert replica.copy is not None
            replica.copy.data = placed.moved(replica.weight, target)
            continue
        if messages.hosted(source):
            executor.materialize(replica.weight._storage)  # type: ignore[attr-defined]
            apart.send(f"W {replica.name} {replica.reader}", 0, replica.weight.detach(), source, target)
        if replica.copy is not None:
            replica.copy.data = apart.receive(f"W {replica.name} {replica.reader}", 0, source, target).detach()


def add_up(replicas: Sequence[Sequence[Replica]], homes: Homes, exchange: Exchange | None) -> None:
    """Add the gradients of copies to those of the weights, as if their stages were one: hooks of the weight run."""
    for replica in (r for found in replicas for r in found):
        grad = None if replica.copy is None else replica.copy.grad
        if replica.copy is not None:
            replica.copy.grad = None
        for found in _arriving(replica, grad, homes, exchange):
            torch.autograd.backward(replica.weight.view_as(replica.weight), found)


def _arriving(replica: Replica, grad: torch.Tensor | None, homes: Homes, exchange: Exchange | None) -> list[torch.Tensor]:
    """The gradient of a copy, where the weight is: one or none."""
    target, source = ends(replica, homes)
    if exchange is None or messages.within_process(source, target):
        return [] if grad is None else [placed.moved(grad, target)]
    if not (replica.weight if replica.copy is None else replica.copy).requires_grad:
        return []
    if messages.hosted(source):
        given = [] if grad is None else [placed.own(grad)]
        executor.sync()
        exchange.send(f"G {replica.name} {replica.reader}", 0, given, source, target)
    return exchange.receive(f"G {replica.name} {replica.reader}", 0, source, target) if messages.hosted(target) else []


def ends(replica: Replica, homes: Homes) -> tuple[Place, Place]:
    """Where the weight lies, and where its copy."""
    source, target = homes[replica.owner], homes[replica.reader]
    assert source is not None and target is not None
    return source, target


def tie_marked(layers: Sequence[nn.Module]) -> None:
    """Make one parameter of those that `manual_pipe_stage.mark_weight_sharing` marked as one, the first layer's."""
    first: dict[str, nn.Parameter] = {}
    for layer in layers:
        marks: dict[str, Any] = getattr(layer, SHARED, {})
        for group, path in marks.items():
            *parents, name = path.split(".")
            owner = layer.get_submodule(".".join(parents))
            weight = first.setdefault(group, layer.get_parameter(path))
            owner._parameters[name] = weight
