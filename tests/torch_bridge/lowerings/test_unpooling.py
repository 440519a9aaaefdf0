"""Fractional max pooling and max unpooling against eager torch."""

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
NAN = float("nan")


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


POOLS = [
    (aten.fractional_max_pool2d, rand(2, 3, 9, 7), [2, 3], [4, 3], rand(2, 3, 2, seed=1)),
    (aten.fractional_max_pool2d, rand(2, 3, 9, 9, dtype=torch.float64), [3, 3], [5, 5], rand(2, 3, 2, seed=2, dtype=torch.float64)),
    (aten.fractional_max_pool2d, rand(3, 8, 8), [2, 2], [1, 7], rand(1, 3, 2, seed=3)),
    (aten.fractional_max_pool2d, torch.ones(1, 1, 6, 6), [2, 2], [3, 3], rand(1, 1, 2, seed=4)),
    (
        aten.fractional_max_pool2d,
        torch.tensor([[1, NAN, 2, 0], [3, NAN, 1, 9], [0, 1, 2, 3], [-1, -2, -3, -4.0]])[None],
        [2, 2],
        [2, 3],
        rand(1, 1, 2),
    ),
    (aten.fractional_max_pool2d, -torch.full((1, 5, 5), float("inf")), [2, 2], [2, 3], rand(1, 1, 2)),
    (aten.fractional_max_pool3d, rand(2, 2, 6, 7, 8), [2, 3, 2], [3, 2, 4], rand(2, 2, 3, seed=5)),
    (aten.fractional_max_pool3d, rand(2, 6, 5, 8), [2, 2, 3], [1, 3, 4], rand(1, 2, 3, seed=6)),
]


@pytest.mark.parametrize("case", POOLS)
@together
def test_fractional_pool(case):
    packet, x, kernel, size, samples = case
    check(packet.default, x, kernel, size, samples)
    out, indices = packet(x, kernel, size, samples)
    backward = getattr(aten, f"{packet.__name__}_backward").default
    check(backward, torch.rand_like(out), x, kernel, size, indices)


def test_gradient_of_fractional_pool():
    packet, x, kernel, size, samples = POOLS[1]
    x = x.clone().requires_grad_()
    packet(x, kernel, size, samples)[0].square().sum().backward()
    low = lowerings.lookup(packet.default).fn
    with _compat.enable_x64():
        got = jax.grad(lambda v: (low(v, kernel, size, to_jax(samples))[0] ** 2).sum())(to_jax(x))
    np.testing.assert_allclose(np.asarray(got), x.grad.numpy())


@together
def test_unpool():
    x = rand(2, 3, 6, 8)
    values, indices = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    check(aten.max_unpool2d.default, values, indices, [6, 8])
    check(aten.max_unpool2d.default, values[0], indices[0], [7, 9])
    values, indices = torch.nn.functional.max_pool3d(rand(2, 2, 4, 6, 4), 2, return_indices=True)
    check(aten.max_unpool3d.default, values, indices, [4, 6, 4], [2, 2, 2], [0, 0, 0])


@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (lambda x: torch.nn.functional.max_pool2d(x, 2), (0, 3, 8, 8)),
        (lambda x: torch.nn.functional.max_pool3d(x, 2), (0, 3, 4, 4, 4)),
        (lambda x: torch.nn.functional.adaptive_max_pool2d(x, 3), (0, 3, 8, 8)),
    ],
)
def test_gradient_of_an_empty_batch(pool, shape):
    x = torch.zeros(shape).to("xla").requires_grad_()
    pool(x).sum().backward()
    assert x.grad.cpu().shape == shape
