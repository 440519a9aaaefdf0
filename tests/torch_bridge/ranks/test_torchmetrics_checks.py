"""torchmetrics' checks look at the distinct values of labels, of which ranks have different numbers: each rank's are looked at alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
import torchmetrics.functional
from torchmetrics.functional.classification.stat_scores import _multiclass_stat_scores_tensor_validation

from tests.torch_bridge.ranks import eager
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.mesh import rank_numbers, world


@pytest.fixture(autouse=True)
def four_ranks(hosted: Hosted) -> None:
    hosted(4)
    assert rank_numbers.is_ranked(world.rank())


def _given(r: Any, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.arange(6, device=device)
    return (places + r) % 3, (places * r) % 3


METRICS: dict[str, Any] = {
    "accuracy": lambda: torchmetrics.Accuracy(task="multiclass", num_classes=3),
    "f1": lambda: torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro"),
    "confusion": lambda: torchmetrics.ConfusionMatrix(task="multiclass", num_classes=3),
    "kappa": lambda: torchmetrics.CohenKappa(task="multiclass", num_classes=3),
}


@pytest.mark.parametrize("device", ["xla", "cpu"])
@pytest.mark.parametrize("name", METRICS)
def test_metrics_of_labels(name: str, device: str) -> None:
    metric = METRICS[name]().to(device)
    metric.update(*_given(world.rank(), device))
    expected = []
    for r in range(4):
        alone = METRICS[name]()
        alone.update(*_given(r, "cpu"))
        expected.append(alone.compute())
    eager.same(metric.compute().to("xla"), expected)


def test_functions() -> None:
    found = torchmetrics.functional.accuracy(*_given(world.rank(), "xla"), task="multiclass", num_classes=3)
    eager.same(found, [torchmetrics.functional.accuracy(*_given(r, "cpu"), task="multiclass", num_classes=3) for r in range(4)])


def test_a_label_of_one_rank_that_is_wrong() -> None:
    metric = torchmetrics.Accuracy(task="multiclass", num_classes=3).to("xla")
    labels = torch.arange(3, device="xla")
    with pytest.raises(RuntimeError, match="Detected more unique values in `target` than expected. Expected only 3 but found 4"):
        metric.update(torch.arange(4, device="xla") % 3, torch.cat([labels, labels[:1] + 3 * (world.rank() == 2)]))
    _multiclass_stat_scores_tensor_validation(torch.tensor([1]), torch.tensor([0]), 3)
