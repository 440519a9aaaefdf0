"""How busy experts are in each step of training: numbers for a logger, and what happened in the steps before."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

import torch

from nxd_jax.modules.moe.expert_load import LoadStatistics
from nxd_jax.modules.moe.load_reader import LoadReader, track

Noted = list[tuple[list[str], torch.Tensor]]
"""Of one step: names of layers, and their counts [layers, E + 1]."""


class LoadOfStep(NamedTuple):
    """step: which call of `LoadLog.step`, from 0. layers: by their names."""

    step: int
    layers: dict[str, LoadStatistics]

    @property
    def worst(self) -> str:
        """The layer with the largest imbalance; of layers that counted nothing none is."""
        return max(self.layers, key=lambda name: (sum(self.layers[name].tokens) > 0, self.layers[name].imbalance))


class LoadLog:
    """Notes what experts got, step by step. (NxD has nothing like it.)

        log = load.LoadLog(model)
        ...
        self.log_dict(log.step())           # Lightning, in `training_step`
        xm.add_step_closure(write, args=(log.step(),))   # a loop of one's own, before `xm.mark_step()`
        print(log.line())                   # "experts: busiest 1.83x of the mean (layers.1.mlp), ..."
        inspect.experts(log).picture()      # all steps

    model: its MoE layers count from now on. prefix: of the names. keep: how many steps are remembered, the last ones.
    """

    def __init__(self, model: torch.nn.Module, prefix: str = "moe", keep: int = 1000):
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1: the number of steps that are remembered")
        track(model)
        self.prefix = prefix
        self._reader = LoadReader(model)
        self._kept: collections.deque[tuple[int, Noted]] = collections.deque(maxlen=keep)
        self._count = 0

    @torch.no_grad()
    def step(self, by_layer: bool = True) -> dict[str, torch.Tensor]:
        """Note what happened since the last call; numbers of it, float32 scalars on the device, which nobody waited for.

        "moe/imbalance": what the busiest expert has over the mean, "moe/dropped_share": of all choices, "moe/idle_experts": that nobody chose; of the layer
        where each is largest. by_layer: also of every layer, "moe/imbalance/layers.0.mlp". 0 where nothing was counted.
        """
        found = [(list(group), counted) for group, counted in self._reader.read()]
        self._kept.append((self._count, found))
        self._count += 1
        numbers = [(names, _numbers(counted)) for names, counted in found]
        made = {f"{self.prefix}/{key}": _largest([of_group[key] for _, of_group in numbers]) for key in _KEYS}
        if by_layer:
            for names, of_group in numbers:
                for key in _KEYS:
                    made |= {f"{self.prefix}/{key}/{name}": n for name, n in zip(names, of_group[key].unbind(), strict=True)}
        return made

    @property
    def steps(self) -> tuple[LoadOfStep, ...]:
        """The steps that are remembered, the oldest first. Waits for the device."""
        return tuple(_read(at, noted) for at, noted in self._kept)

    def line(self) -> str:
        """The last step in words, of the layer with the largest imbalance. Waits for the device. Raises ValueError before the first `step`."""
        if not self._kept:
            raise ValueError("no step was noted yet: call log.step() after each optimizer step, and line() after that")
        last = _read(*self._kept[-1])
        return f"experts: {last.layers[last.worst]} ({last.worst})" if last.worst else f"experts: {last.layers['']}"


_KEYS = ("imbalance", "dropped_share", "idle_experts")


def _numbers(counted: torch.Tensor) -> dict[str, torch.Tensor]:
    """[layers] each."""
    tokens, dropped = counted[:, :-1], counted[:, -1]
    total = tokens.sum(1).clamp(min=1)
    found = (tokens.amax(1) * tokens.shape[1] / total, dropped / total, (tokens == 0).sum(1))
    return {key: number.to(torch.float32) for key, number in zip(_KEYS, found, strict=True)}


def _largest(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([number.amax() for number in numbers]).amax()


def _read(at: int, noted: Noted) -> LoadOfStep:
    return LoadOfStep(
        at, {n: LoadStatistics.of_counts(row) for names, counted in noted for n, row in zip(names, counted.cpu(), strict=True)}
    )
