from __future__ import annotations

import itertools

import pytest
import torch

from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check

aten = torch.ops.aten
torch.manual_seed(0)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
GRID = torch.cat([torch.rand(2, 3, 5, 2) * 4 - 2, torch.tensor([-1.0, 1.0]).expand(2, 1, 5, 2), torch.zeros(2, 1, 5, 2)], 1)


@pytest.mark.thorough(keep=5)
@pytest.mark.parametrize(("mode", "padding", "align"), list(itertools.product((0, 1, 2), (0, 1, 2), (False, True))))
@together
def test_2d(mode, padding, align):
    x = torch.randn(2, 3, 4, 6)
    check(aten.grid_sampler_2d.default, x, GRID, mode, padding, align, **CLOSE)
    g = torch.randn(2, 3, 5, 5)
    grid = GRID + 0.013  # away from pixel centres, where gradients jump
    check(aten.grid_sampler_2d_backward.default, g, x, grid, mode, padding, align, [True, True], rtol=1e-3, atol=1e-3)


@pytest.mark.thorough(keep=5)
@pytest.mark.parametrize(("mode", "padding", "align"), list(itertools.product((0, 1), (0, 1, 2), (False, True))))
@together
def test_3d(mode, padding, align):
    x, grid = torch.randn(2, 3, 3, 4, 5), torch.rand(2, 2, 3, 4, 3) * 4 - 2
    check(aten.grid_sampler_3d.default, x, grid, mode, padding, align, **CLOSE)
    g = torch.randn(2, 3, 2, 3, 4)
    check(aten.grid_sampler_3d_backward.default, g, x, grid, mode, padding, align, [True, True], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("mode", "padding", "align"), list(itertools.product((0, 1), (0, 1, 2), (False, True))))
@together
def test_coordinates_that_are_no_place(mode, padding, align):
    """In three dims torch takes NaN for a place outside, or for the last one where the border is repeated."""
    lost, far = float("nan"), float("inf")
    grid = torch.tensor([[lost, 0.0, 0.3], [0.1, lost, 0.2], [0.3, 0.1, lost], [far, 0.2, 0.1], [0.1, -far, 0.4]]).reshape(1, 1, 1, 5, 3)
    check(aten.grid_sampler_3d.default, torch.randn(1, 2, 3, 4, 5), grid, mode, padding, align, **CLOSE)


@together
def test_gradients_at_no_place():
    grid = torch.tensor([[float("nan"), 0.0, 0.3], [0.1, 0.2, 0.3]]).reshape(1, 1, 1, 2, 3)
    given = torch.randn(1, 2, 1, 1, 2), torch.randn(1, 2, 3, 4, 5), grid
    check(aten.grid_sampler_3d_backward.default, *given, 0, 0, False, [True, True], rtol=1e-3, atol=1e-3)


@together
def test_corners():
    x = torch.randn(1, 2, 1, 1)
    check(aten.grid_sampler_2d.default, x, torch.rand(1, 2, 2, 2), 0, 2, True)
    check(aten.grid_sampler_2d.default, x, torch.rand(1, 2, 2, 2), 0, 1, False)
    check(aten.grid_sampler_2d.default, torch.randn(1, 2, 4, 4).double(), torch.rand(1, 2, 2, 2).double(), 0, 0, False)
    check(aten.grid_sampler_2d_backward.default, torch.randn(1, 2, 2, 2), x, torch.rand(1, 2, 2, 2), 0, 0, True, [False, True])
