"""`pipeline.manual_pipe_stage`: stages of a list of layers compute what the whole list does, under names that do not depend on the number of stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from neuronx_distributed.pipeline.manual_pipe_stage import PipelineStageModule, mark_weight_sharing
from torch import Tensor, nn


class First(nn.Module):
    """Takes the list that NxD gives to the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)

    def forward(self, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        (x,) = inputs
        return self.inner(x), x


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, x = inputs
        return hidden + self.inner(hidden), x


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return inputs[0] * self.inner(inputs[1])


def model(middles: int = 3) -> list[nn.Module]:
    torch.manual_seed(0)
    return [First(), *(Middle() for _ in range(middles)), Last()]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
def test_stages_in_a_row_compute_what_the_model_does(stages: int) -> None:
    layers = model()
    x = torch.randn(2, 4)
    whole: Any = [x]
    for layer in layers:
        whole = layer(whole)
    parts = [PipelineStageModule(layers, stages, k) for k in range(stages)]
    found: Any = x
    for part in parts:
        found = part(found)
    assert torch.equal(found, whole)
    names = [name for part in parts for name in part.state_dict()]
    assert names == [f"layers.{k}.inner.{what}" for k in range(5) for what in ("weight", "bias")]


@pytest.mark.parametrize(
    ("layers", "stages", "expected"), [(5, 4, [0, 1, 2, 3, 3]), (4, 2, [0, 0, 1, 1]), (7, 3, [0, 0, 1, 1, 2, 2, 2]), (3, 3, [0, 1, 2])]
)
def test_even_partition(layers: int, stages: int, expected: list[int]) -> None:
    modules = [nn.Identity() for _ in range(layers)]
    assert list(PipelineStageModule._partition_evenly(modules, stages).values()) == expected
    assert [len(PipelineStageModule(modules, stages, k).stage_modules) for k in range(stages)] == [expected.count(k) for k in range(stages)]


def test_state_train_and_parameters_reach_the_layers() -> None:
    stage = PipelineStageModule(model(), 2, 1)
    assert stage.stage_modules == [stage.layers[name] for name in ("2", "3", "4")]
    stage.eval()
    assert not any(layer.training for layer in stage.stage_modules)
    other = PipelineStageModule(model(), 2, 1)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    other.load_state_dict(stage.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(stage.parameters(), other.parameters(), strict=True))


def test_own_partition() -> None:
    layers = model()
    cut = {layer: int(k > 0) for k, layer in enumerate(layers)}
    assert PipelineStageModule(layers, 2, 0, lambda given, stages: cut).stage_modules == layers[:1]


@pytest.mark.parametrize("mark", [mark_weight_sharing, PipelineStageModule.mark_weight_sharing])
def test_shared_weights(mark: Callable[..., None]) -> None:
    layers = model()
    mark([(layers[0], "inner.weight"), (layers[4], "inner.weight")], "ends")
    parts = [PipelineStageModule(layers, 5, k) for k in range(5)]
    assert [sorted(part.shared_weights_on_pp_stages) for part in parts] == [["ends"], [], [], [], ["ends"]]
    assert parts[0].shared_weights_on_pp_stages["ends"] == [[0, 4], [layers[0], "inner.weight"]]
    assert parts[4].shared_weights_on_pp_stages["ends"] == [[0, 4], [layers[4], "inner.weight"]]


def test_names_that_nxds_tests_ask_for() -> None:
    layers = [nn.Linear(8, 8) for _ in range(4)]
    PipelineStageModule.mark_weight_sharing([(layers[0], "weight"), (layers[-1], "weight")])
    assert layers[0].weight_sharing == layers[-1].weight_sharing == {"default": "weight"} and not hasattr(layers[1], "weight_sharing")
    stages = dict(zip(layers, range(4), strict=True))
    gather = PipelineStageModule._gather_pp_stage_idxs_for_weight_sharing
    shared = {k: gather(stage_idx_mapping=stages, current_stage_idx=k) for k in range(4)}
    assert shared == {0: {"default": [[0, 3], [layers[0], "weight"]]}, 1: {}, 2: {}, 3: {"default": [[0, 3], [layers[3], "weight"]]}}
    cut = {layer: min(k, 1) for k, layer in enumerate(layers)}
    assert PipelineStageModule._partition(layers, 2, 0, lambda *_: cut) == ([layers[0]], {"default": [[0, 1], [layers[0], "weight"]]})
    assert PipelineStageModule._partition(tuple(layers), 2, 1)[0] == layers[2:]


def _twice(layers: list[nn.Module]) -> None:
    mark_weight_sharing([(layers[1], "inner.weight"), (layers[2], "inner.weight")], "g")
    mark_weight_sharing([(layers[1], "inner.bias"), (layers[3], "inner.bias")], "g")


def _cut(layers: list[nn.Module], stages: list[int], count: int = 2) -> None:
    PipelineStageModule(layers, count, 0, lambda given, n: dict(zip(given, stages, strict=False)))


@pytest.mark.parametrize(
    ("mistake", "kind", "said"),
    [
        (
            lambda layers: PipelineStageModule(layers, 6, 0),
            AssertionError,
            "5 layers cannot make 6 stages: each needs one. Use fewer stages",
        ),
        (
            lambda layers: PipelineStageModule(nn.Sequential(*layers), 2, 0),
            AssertionError,
            "takes a list or tuple of layers, got Sequential",
        ),
        (lambda layers: PipelineStageModule(layers, 2, 2), ValueError, "stage_index=2: 2 stages are numbered 0 to 1"),
        (lambda layers: PipelineStageModule([layers[0], *layers], 2, 0), AssertionError, "stages for 5 layers, the model has 6"),
        (lambda layers: _cut(layers, [0, 1]), AssertionError, "the partition has stages for 2 layers, the model has 5"),
        (lambda layers: _cut(layers, [0, 1, 0, 1, 1]), ValueError, r"gave the stages \[0, 1, 0, 1, 1\]: they must go up from 0 to 1"),
        (lambda layers: _cut(layers, [0, 0, 0, 0, 0]), ValueError, "each with a layer"),
        (_twice, RuntimeError, "Middle has a weight of the group 'g' already, inner.weight"),
        (
            lambda layers: mark_weight_sharing([(layers[1], "inner.weight")] * 2, "g"),
            RuntimeError,
            "Middle has a weight of the group 'g' already",
        ),
        (
            lambda layers: mark_weight_sharing([(layers[0], "inner.weight"), (layers[1], "inner.weight")], "g"),
            AssertionError,
            r"weights of the group 'g' must have one shape and dtype to be shared, got First.inner.weight \(8, 4\) torch.float32, Middle",
        ),
        (
            lambda layers: mark_weight_sharing([(nn.Linear(2, 3), "weight"), (nn.Linear(4, 3), "weight")], "g"),
            AssertionError,
            r"to be shared, got Linear.weight \(3, 2\) torch.float32, Linear.weight \(3, 4\)",
        ),
        (
            lambda layers: mark_weight_sharing([(layers[0], "weight"), (layers[1], "inner.weight")], "g"),
            AttributeError,
            "First has no parameter 'weight'; it has inner.weight, inner.bias",
        ),
        (lambda layers: mark_weight_sharing([(layers[0], "inner.weight")], "g"), ValueError, "needs two weights or more to share, got 1"),
    ],
)
def test_mistakes(mistake: Callable[[list[nn.Module]], object], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        mistake(model())


def test_a_refused_mark_leaves_no_mark() -> None:
    layers = model()
    with pytest.raises(RuntimeError):
        _twice(layers)
    assert PipelineStageModule(layers, 1, 0).shared_weights_on_pp_stages == {"g": [[0], [layers[1], "inner.weight"]]}
