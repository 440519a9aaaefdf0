"""Reading the counts of a model's MoE layers, on the device: all layers at once, and only what is new."""

from __future__ import annotations

from typing import Any

import torch

from nxd_jax.modules.moe.expert_load import ExpertLoad, everywhere
from nxd_jax.modules.moe.model import MoE
from nxd_jax.tensor_parallel import parallel_groups
from torch_bridge.recorder import placed
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.runtime import executor

Layers = dict[str, Any]
"""MoE layers by their names in the model."""


def layers(model: torch.nn.Module) -> Layers:
    """The MoE layers of a model that this process has. Raises ValueError if the model has none at all."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no MoE layers (nxd_jax.modules.moe.MoE): there are no experts to count tokens of")
    return {name: layer for name, layer in found.items() if layer.router.linear_router.weight is not None}


def track(model: torch.nn.Module) -> dict[str, ExpertLoad]:
    """Let every MoE layer of a model count from now on (those that do go on), by the layers' names. Raises ValueError if there is none."""
    found: dict[str, ExpertLoad] = {}
    for name, layer in layers(model).items():
        if layer.load is None:
            layer.load = _beside(layer.router.linear_router.weight, layer.router.num_experts)
        found[name] = layer.load
    return found


def _beside(weight: torch.Tensor, num_experts: int) -> ExpertLoad:
    """Counts that lie where a weight does: in a pipeline with the stage."""
    made = ExpertLoad(num_experts, weight.device)
    place = placed.place_of(weight) if isinstance(weight, XLATensor) else None
    if place is not None:
        placed.move_(made.counts, place)
    return made


class LoadReader:
    """What the experts of a model got since this reader looked last, summed over data- and context-parallel ranks. Every layer has to count."""

    def __init__(self, model: torch.nn.Module):
        self._groups = _alike(layers(model))
        self._before = [_counted_so_far(group) for group in self._groups]

    @torch.no_grad()
    def read(self) -> list[tuple[Layers, torch.Tensor]]:
        """Groups of layers with as many experts, and for each int64 [layers, E + 1]: new choices of each expert, then how many were dropped.

        Waits for nothing. Raises ValueError for layers that have been told to count no more.
        """
        found = []
        for group, before in zip(self._groups, self._before, strict=True):
            now = _counts(group)
            found.append((group, everywhere(now - before)))
            before.copy_(now)
        return found


def _alike(found: Layers) -> list[Layers]:
    """Layers whose counts can be stacked. Those of a pipeline lie with different stages, and each is by itself."""
    groups: dict[Any, Layers] = {}
    apart = parallel_groups.initialized() and parallel_groups.size("pp") > 1
    for name, layer in found.items():
        groups.setdefault(name if apart else layer.router.num_experts, {})[name] = layer
    return list(groups.values())


def _counted_so_far(group: Layers) -> torch.Tensor:
    """Their counts as they are now: computed at once, so that the program of the first step is that of the others."""
    found = _counts(group) + 0
    if isinstance(found, XLATensor):
        executor.materialize(found._storage)
    return found


def _counts(group: Layers) -> torch.Tensor:
    """[layers, E + 1], of this rank."""
    silent = [name for name, layer in group.items() if layer.load is None]
    if silent:
        raise ValueError(
            f"the MoE layer {silent[0] or 'given'} does not count its tokens (load.untrack?): call load.track(model), and make this anew"
        )
    return torch.stack([layer.load.counts for layer in group.values()])
