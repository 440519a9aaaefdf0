"""How busy experts are, and routers that keep them equally busy without an auxiliary loss. (NxD has neither.)

    load.track(model)                               # before training: every MoE layer counts from now on
    balancer = load.ExpertBalancer(model)           # for routers with `balancing_bias=True` and GroupLimitedRouter
    log = load.LoadLog(model)                       # what happens in each step
    ...
    optimizer.step(); balancer.step()
    metrics = log.step()                            # {"moe/imbalance": ..., "moe/dropped_share": ...}, on the device
    print(load.measure(model))                      # by layer: tokens by expert, imbalance, share that was dropped

Counting is part of the step's program and waits for nothing; `measure` reads the numbers. `nxd_jax.inspect.experts` draws them.
Each process counts the layers that it has: in a pipeline of several processes those of its own stages. E: experts, k: experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch

from nxd_jax.modules.moe.expert_load import ExpertLoad, LoadStatistics
from nxd_jax.modules.moe.load_log import LoadLog
from nxd_jax.modules.moe.load_reader import LoadReader, layers, track

__all__ = ["ExpertBalancer", "ExpertLoad", "LoadLog", "LoadStatistics", "measure", "track", "untrack"]


def untrack(model: torch.nn.Module) -> None:
    """Count no more. What was counted is forgotten."""
    for layer in layers(model).values():
        layer.load = None


def measure(model: torch.nn.Module, reset: bool = False) -> dict[str, LoadStatistics]:
    """What was counted since `track` or the last reset, by the names of the layers. Waits for the device. reset: then begin anew.

    Raises ValueError for layers that do not count.
    """
    found: dict[str, LoadStatistics] = {}
    for name, layer in layers(model).items():
        if layer.load is None:
            raise ValueError(f"the MoE layer {name or 'given'} does not count its tokens: call load.track(model) before training")
        found[name] = layer.load.statistics()
        if reset:
            layer.load.reset()
    return found


class ExpertBalancer:
    """Balancing without an auxiliary loss: after each step the bias by which a router chooses grows for experts that got less than the mean, and falls for
    others.

    model: its MoE layers count from now on. rate: by how much a bias moves, in units of affinities (DeepSeek-V3: 0.001). Only the choice of experts sees the
    bias; affinities, and so outputs for given experts, do not. Biases are buffers of the routers, in float32, and so are in checkpoints.

    Raises ValueError for a rate that is not positive, and for routers without a bias.
    """

    def __init__(self, model: torch.nn.Module, rate: float = 0.001):
        if not rate > 0:
            raise ValueError(f"rate={rate} must be positive: it is what a bias moves by after each step")
        for name, layer in layers(model).items():
            if layer.router.e_score_correction_bias is None:
                raise ValueError(
                    f"the {type(layer.router).__name__} of {name or 'the layer'} has no bias for choosing experts: build it with balancing_bias=True, or use "
                    "GroupLimitedRouter"
                )
        track(model)
        self.rate = rate
        self._reader = LoadReader(model)

    @torch.no_grad()
    def step(self) -> None:
        """Move the biases by what was counted since the last call. To be called after `optimizer.step()`; all ranks of a layer get the same biases."""
        for found, counted in self._reader.read():
            tokens = counted[:, :-1]
            moves = self.rate * torch.sign(tokens.sum(1, keepdim=True) - tokens.shape[1] * tokens)
            for layer, move in zip(found.values(), moves, strict=True):
                bias = layer.router.e_score_correction_bias
                bias += move.to(bias.dtype)

    def attach(self, optimizer: torch.optim.Optimizer) -> Any:
        """Call `step` after every step of an optimizer; returns the hook's handle, whose `remove()` ends that."""
        return optimizer.register_step_post_hook(lambda *_: self.step())
