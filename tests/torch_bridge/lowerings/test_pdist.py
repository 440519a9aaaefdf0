"""pdist against eager torch: all kinds of p, coinciding rows, gradients."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

import torch_bridge.lowerings as lowerings
from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check, to_jax
from torch_bridge import _compat

aten = torch.ops.aten
P = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf")]


def points(dtype=torch.float64):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=dtype)
    x[3] = x[1]
    x[4, 0] = x[0, 0]
    return x


@pytest.mark.parametrize("p", P)
def test_values_and_gradient(p):
    x = points().requires_grad_()
    check(aten._pdist_forward.default, points(torch.float32), p)
    out = aten._pdist_forward(x, p)
    grad = torch.randn(10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    check(aten._pdist_backward.default, grad, points(), p, out.detach())
    out.backward(grad)
    with _compat.enable_x64():
        low = lowerings.lookup(aten._pdist_forward.default).fn
        got = jax.grad(lambda v: (low(v, p) * to_jax(grad)).sum())(to_jax(x))
    np.testing.assert_allclose(np.asarray(got), x.grad.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (2, 3), (3, 0)])
@together
def test_few_points(shape):
    if shape[1]:  # torch fills points without coordinates from uninitialised memory or crashes
        check(aten._pdist_forward.default, torch.randn(shape))
    n = shape[0] * (shape[0] - 1) // 2
    if shape[0]:  # torch crashes
        check(aten._pdist_backward.default, torch.ones(n), torch.ones(shape), 2.0, torch.zeros(n))
