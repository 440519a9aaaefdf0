"""What the parameters and buffers of stages are called in the whole model, as files of pipeline ranks have them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from nxd_jax.pipeline import partition
from nxd_jax.pipeline.stages import Stages


def by_rank(model: nn.Module, stages: Stages, ranks: int) -> list[list[str]]:
    """For each pipeline rank the names of what its stages read, stage by stage in the order in which a stage has it.

    Stage s belongs to rank s modulo `ranks`, as in NxD, whatever the schedule. A tensor that a stage has under several names is there under each; one that
    stages of several ranks read is in the list of each, under the name that the module has which reads it.
    """
    names = _Names(model)
    found: list[dict[str, None]] = [{} for _ in range(ranks)]
    for stage in stages:
        mine = found[partition.stage_to_pipeline_parallel_rank(stage.index, ranks)]
        mine.update(dict.fromkeys(name for module, key, t in _tensors(stage.module) for name in names.of(module, key, t)))
    return [list(own) for own in found]


def in_order(model: nn.Module) -> list[str]:
    """The names of a model's parameters and buffers that its state dict has, module by module."""
    modules = model.named_modules(remove_duplicate=False)
    return [f"{prefix}.{key}".lstrip(".") for prefix, module in modules for key, _ in _own(module)]


class _Names:
    """Names of tensors in a model, by the module that holds them and by themselves."""

    def __init__(self, model: nn.Module):
        self._by_holder: dict[tuple[int, str], list[str]] = {}
        self._first: dict[int, str] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for key, t in _own(module):
                name = f"{prefix}.{key}" if prefix else key
                self._by_holder.setdefault((id(module), key), []).append(name)
                self._first.setdefault(id(t), name)

    def of(self, module: nn.Module, key: str, t: torch.Tensor) -> list[str]:
        """A traced model has copies of modules whose parameters `forward` reads itself: those go by the parameter's first name."""
        held = self._by_holder.get((id(module), key))
        if held is not None:
            return held
        return [self._first[id(t)]] if id(t) in self._first else []


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a module itself that its state dict has."""
    yield from ((key, p) for key, p in module._parameters.items() if p is not None)
    yield from ((key, b) for key, b in module._buffers.items() if b is not None and key not in module._non_persistent_buffers_set)


def _tensors(stage: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for module in stage.modules():
        for key, t in _own(module):
            yield module, key, t
