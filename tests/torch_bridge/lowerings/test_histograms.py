"""histogramdd against eager torch: given edges, counts, ranges, weights, densities, numbers outside and on edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_bridge
from torch_bridge import metrics

torch_bridge.register()

POINTS = torch.tensor([[0.0, 0.0], [0.5, 1.0], [1.0, 2.0], [2.0, 0.5], [-1.0, 0.0], [3.0, 3.0], [float("nan"), 0.0], [0.25, 1.75]])
CLEAN = POINTS[:6]
EDGES = [torch.tensor([0.0, 0.5, 1.0, 2.0]), torch.tensor([0.0, 1.0, 2.0])]
WEIGHT = torch.linspace(0.5, 2.0, 8)

CASES: dict[str, tuple[torch.Tensor, Any, dict[str, Any]]] = {
    "edges": (POINTS, EDGES, {}),
    "edges, weights": (POINTS, EDGES, {"weight": WEIGHT}),
    "edges, density": (POINTS, EDGES, {"weight": WEIGHT, "density": True}),
    "counts": (CLEAN, [3, 2], {}),
    "one count": (CLEAN, 4, {}),
    "range": (CLEAN, [3, 2], {"range": [0.0, 2.0, -1.0, 1.0], "weight": WEIGHT[:6]}),
    "density": (CLEAN, [3, 2], {"density": True}),
    "all equal": (torch.ones(3, 2), [2, 3], {}),
    "batched": (CLEAN.view(3, 2, 2), [2, 2], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_counts(name: str) -> None:
    x, bins, kwargs = CASES[name]
    before = {k: v for k, v in metrics.COUNTERS.items() if k.startswith("aten::")}
    expected, edges = torch.histogramdd(x, bins, **kwargs)
    moved = [b.to("xla") for b in bins] if bins is EDGES else bins
    found, found_edges = torch.histogramdd(
        x.to("xla"), moved, **{k: v.to("xla") if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    )
    torch.testing.assert_close(found.cpu(), expected)
    for f, e in zip(found_edges, edges, strict=True):
        torch.testing.assert_close(f.cpu(), e)
    assert {k: v for k, v in metrics.COUNTERS.items() if k.startswith("aten::")} == before
