"""`neuronx_distributed.pipeline.manual_pipe_stage`: a stage of a model that is given as a list of layers, without tracing.

`NxDPPModel(layers, manual_pp_partition=True)` makes one of each pipeline rank's layers and runs steps through them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nxd_jax.pipeline.partition import even_sizes

SHARED = "weight_sharing"
"""Attribute of a layer with marked weights: path of the weight by group."""

PartitionFn = Callable[[list[nn.Module], int], Mapping[nn.Module, int]]


def mark_weight_sharing(layers_and_weights: Sequence[tuple[nn.Module, str]], group_name: str = "default") -> None:
    """`manual_pipe_stage.PipelineStageModule.mark_weight_sharing`: say that weights of these layers are one weight, before stages are made of them.

    layers_and_weights: (layer, dotted path of its parameter) pairs. Raises RuntimeError if a layer has a weight of this group already, AttributeError for a
    path that leads to no parameter, AssertionError for shapes or dtypes that differ, ValueError for fewer than two.
    """
    if len(layers_and_weights) < 2:
        raise ValueError(f"mark_weight_sharing({group_name!r}) needs two weights or more to share, got {len(layers_and_weights)}")
    weights = [weight_at(layer, path) for layer, path in layers_and_weights]
    if len({(weight.shape, weight.dtype) for weight in weights}) > 1:
        said = ", ".join(
            f"{layer.__class__.__name__}.{path} {tuple(weight.shape)} {weight.dtype}"
            for (layer, path), weight in zip(layers_and_weights, weights, strict=True)
        )
        raise AssertionError(f"weights of the group {group_name!r} must have one shape and dtype to be shared, got {said}")
    seen: set[nn.Module] = set()
    for layer, path in layers_and_weights:
        if group_name in getattr(layer, SHARED, {}) or layer in seen:
            other = getattr(layer, SHARED, {}).get(group_name, path)
            raise RuntimeError(
                f"{layer.__class__.__name__} has a weight of the group {group_name!r} already, {other}: a layer has one weight of a group; use another "
                "group_name for others"
            )
        seen.add(layer)
    for layer, path in layers_and_weights:
        layer.__dict__.setdefault(SHARED, {})[group_name] = path


def weight_at(layer: nn.Module, path: str) -> nn.Parameter:
    """The parameter at a dotted path. Raises AttributeError if there is none."""
    try:
        return layer.get_parameter(path)
    except AttributeError as error:
        known = ", ".join(name for name, _ in layer.named_parameters()) or "none"
        raise AttributeError(f"{layer.__class__.__name__} has no parameter {path!r}; it has {known}") from error


class PipelineStageModule(nn.Module):
    """`manual_pipe_stage.PipelineStageModule`: the layers of one stage, applied one after the other.

    Args:
        layers: of the whole model, in order.
        num_stages: stages in all.
        stage_index: this stage, from 0.
        partition_fn: `(layers, num_stages)` to a dict from each layer to its stage; default: as evenly as possible, what is left over to the last stages.

    Attributes:
        stage_modules: the layers of this stage, a list.
        layers: the same as an `nn.ModuleDict`, by their index in the whole model: `layers.3.weight` is the same weight in any number of stages. (NxD keeps them
            in a plain list, which `state_dict`, `train` and `eval` do not reach, and counts from 0 on each rank.)
        layer_to_stage: the stage of every layer of the model.
        shared_weights_on_pp_stages: by group of `mark_weight_sharing`: [[stages], [layer, path]], for groups of which this stage has a weight.

    The first layer of the first stage is given a list of tensors, as NxD gives it; other layers get what the layer before returned.
    """

    def __init__(self, layers: Sequence[nn.Module], num_stages: int, stage_index: int, partition_fn: PartitionFn | None = None):
        super().__init__()
        if not isinstance(layers, (list, tuple)):
            raise AssertionError(f"PipelineStageModule takes a list or tuple of layers, got {type(layers).__name__}: give it list(layers)")
        if not 0 <= stage_index < num_stages:
            raise ValueError(f"stage_index={stage_index}: {num_stages} stages are numbered 0 to {num_stages - 1}")
        self.num_stages, self.stage_index = num_stages, stage_index
        self.layer_to_stage = _stages_of(layers, num_stages, partition_fn)
        self.layers = nn.ModuleDict({str(k): layer for k, layer in enumerate(layers) if self.layer_to_stage[layer] == stage_index})
        self.shared_weights_on_pp_stages = self._gather_pp_stage_idxs_for_weight_sharing(self.layer_to_stage, stage_index)

    @property
    def stage_modules(self) -> list[nn.Module]:
        """The layers of this stage."""
        return list(self.layers.values())

    @staticmethod
    def mark_weight_sharing(layer_and_weight_path: Sequence[tuple[nn.Module, str]], sharing_group_name: str = "default") -> None:
        """`mark_weight_sharing` of this module."""
        mark_weight_sharing(layer_and_weight_path, sharing_group_name)

    @staticmethod
    def _partition_evenly(layers: Sequence[nn.Module], num_stages: int) -> dict[nn.Module, int]:
        """The stage of each layer; what does not come out even goes to the last stages, one layer each. AssertionError for fewer layers than stages."""
        sizes = even_sizes(len(layers), num_stages)
        stages = [stage for stage, count in enumerate(sizes) for _ in range(count)]
        return dict(zip(layers, stages, strict=True))

    @staticmethod
    def _partition(
        layers: Sequence[nn.Module], num_stages: int, stage_idx: int, partition_fn: PartitionFn | None = None
    ) -> tuple[list[nn.Module], dict[str, list[Any]]]:
        """The layers of a stage, and its `shared_weights_on_pp_stages`."""
        found = _stages_of(layers, num_stages, partition_fn)
        shared = PipelineStageModule._gather_pp_stage_idxs_for_weight_sharing(found, stage_idx)
        return [layer for layer in layers if found[layer] == stage_idx], shared

    @staticmethod
    def _gather_pp_stage_idxs_for_weight_sharing(
        stage_idx_mapping: Mapping[nn.Module, int], current_stage_idx: int
    ) -> dict[str, list[Any]]:
        """A stage's `shared_weights_on_pp_stages`. stage_idx_mapping: the stage of each layer of the model."""
        groups: dict[str, list[tuple[nn.Module, str]]] = {}
        for layer in stage_idx_mapping:
            for group, path in getattr(layer, SHARED, {}).items():
                groups.setdefault(group, []).append((layer, path))
        found: dict[str, list[Any]] = {}
        for group, members in groups.items():
            mine = [[layer, path] for layer, path in members if stage_idx_mapping[layer] == current_stage_idx]
            if mine:
                found[group] = [sorted({stage_idx_mapping[layer] for layer, _ in members}), mine[0]]
        return found

    def forward(self, inputs: Any) -> Any:
        """What the last layer of the stage gives."""
        first, *others = self.layers.values()
        found = self._first(first, inputs) if self.stage_index == 0 else first(inputs)
        for layer in others:
            found = layer(found)
        return found

    @staticmethod
    def _first(layer: nn.Module, inputs: Any) -> Any:
        """What the model's first layer makes of a list of tensors."""
        try:
            return layer([inputs] if isinstance(inputs, torch.Tensor) else inputs)
        except (TypeError, AttributeError) as error:
            error.add_note(
                f"The first layer in manual mode ({type(layer).__name__}) is given a list of tensors, as NxD gives it: let its forward(self, inputs) "
                "start with (x,) = inputs, or put a layer before it that does"
            )
            raise


def _stages_of(layers: Sequence[nn.Module], num_stages: int, partition_fn: PartitionFn | None) -> dict[nn.Module, int]:
    """The stage of each layer."""
    found = (partition_fn or PipelineStageModule._partition_evenly)(list(layers), num_stages)
    _check_partition(found, layers, num_stages)
    return dict(found)


def _check_partition(found: Mapping[nn.Module, int], layers: Sequence[nn.Module], num_stages: int) -> None:
    """Every layer has a stage, every stage a layer, and stages follow the order of the layers."""
    if len(found) != len(layers) or any(layer not in found for layer in layers):
        raise AssertionError(
            f"the partition has stages for {len(found)} layers, the model has {len(layers)}: partition_fn must give a stage to each layer, and no layer may "
            "stand in the list twice"
        )
    stages = [found[layer] for layer in layers]
    if sorted(stages) != stages or set(stages) != set(range(num_stages)):
        raise ValueError(f"partition_fn gave the stages {stages}: they must go up from 0 to {num_stages - 1}, each with a layer")
