"""Weights of stages: on which cores they lie, and those that several stages use."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from nxd_jax.pipeline.manual_pipe_stage import SHARED
from nxd_jax.pipeline.runtime import Replica
from nxd_jax.pipeline.stages import Stage, Stages
from torch_bridge.mesh.places import Place
from torch_bridge.recorder import placed

logger = logging.getLogger("nxd_jax")

Homes = Sequence[Place | None]


def check(stages: Stages) -> None:
    """Warn of stages without parameters."""
    for stage in stages:
        if next(stage.module.parameters(), None) is None:
            logger.warning("stage %d of the pipeline has no parameters: cut the model elsewhere to give it work", stage.index)


def _holders(stage: Stage) -> Iterator[tuple[nn.Parameter, nn.Module, str]]:
    """Each parameter of a stage with the modules that have it."""
    for module in stage.module.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield parameter, module, name


Copies = dict[tuple[int, Place], nn.Parameter]
"""Copies of weights at other places than their own, by the weight's `id`."""


def place(stages: Stages, homes: Homes, copies: Copies) -> None:
    """Move each parameter to the place of the first stage that uses it, and give other stages copies (`Stages.replicas`). copies: those there are, extended."""
    owner: dict[int, int] = {}
    replicas: list[list[Replica]] = [[] for _ in stages]
    for stage in stages:
        home = homes[stage.index]
        found: dict[int, Replica] = {}
        for parameter, module, name in _holders(stage):
            first = owner.setdefault(id(parameter), stage.index)
            if first == stage.index:
                if home is not None:
                    placed.move_(parameter, home)
            elif homes[first] != home and home is not None:
                if (id(parameter), home) not in copies:
                    copies[id(parameter), home] = _copy(parameter, home)
                known = found.setdefault(id(parameter), Replica(parameter, copies[id(parameter), home], []))
                known.holders.append((module, name))
        replicas[stage.index] = list(found.values())
    stages.replicas = replicas


def _copy(weight: nn.Parameter, home: Place) -> nn.Parameter:
    copy = nn.Parameter(placed.moved(weight, home), weight.requires_grad)
    copy.__dict__.update({key: value for key, value in weight.__dict__.items() if not key.startswith("_")})
    return copy


def put_back(stages: Stages, homes: Homes) -> None:
    """Move weights to their places that lie elsewhere now, because a checkpoint was loaded, say."""
    seen: set[int] = set()
    for stage in stages:
        home = homes[stage.index]
        for parameter in stage.module.parameters() if home is not None else ():
            if id(parameter) not in seen and home is not None and placed.place_of(parameter) != home:
                placed.move_(parameter, home)
            seen.add(id(parameter))


def refresh(replicas: Sequence[Sequence[Replica]]) -> None:
    """Give copies the values that the weights have now."""
    for replica in (r for found in replicas for r in found):
        home = placed.place_of(replica.copy)
        assert home is not None
        replica.copy.data = placed.moved(replica.weight, home)


def add_up(replicas: Sequence[Sequence[Replica]]) -> None:
    """Add the gradients of copies to those of the weights, as if their stages were one: hooks of the weight run."""
    for replica in (r for found in replicas for r in found):
        if replica.copy.grad is None:
            continue
        home = placed.place_of(replica.weight)
        grad = replica.copy.grad if home is None else placed.moved(replica.copy.grad, home)
        replica.copy.grad = None
        torch.autograd.backward(replica.weight.view_as(replica.weight), grad)


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
