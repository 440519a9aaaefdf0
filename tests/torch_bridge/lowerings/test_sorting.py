from __future__ import annotations

import pytest
import torch

import torch_bridge.lowerings as lowerings
from tests.torch_bridge.lowerings.autograd_parity import check_grad
from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check, to_jax, to_torch
from torch_bridge import _compat
from torch_bridge.ir.dtypes import Scalar

aten = torch.ops.aten
T = torch.tensor
torch.manual_seed(0)
NAN, INF = float("nan"), float("inf")
ODD = T([[1.0, NAN, -INF, 0.0, -0.0, 1.0], [INF, -NAN, 2.0, NAN, INF, -5.0]])
INTS = T([[3, -1, 3, 2**62, -(2**63), 0], [1, 1, 1, 0, 0, 2]])
X = torch.randn(3, 40)


@pytest.mark.core(keep=8)
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    "x", [ODD, INTS, X, INTS > 0, ODD.bfloat16(), INTS.to(torch.uint8), T(3.0), torch.zeros(2, 0), ODD.double(), INTS.int(), ODD.half()]
)
@together
def test_sort(x, descending):
    check(aten.sort.stable, x, stable=True, descending=descending)
    check(aten.sort.stable, x, stable=True, dim=0, descending=descending)
    if x is X:
        check(aten.sort.default, x, -1, descending)
        check(aten.sort.stable, x, stable=None)


@pytest.mark.core(keep=20)
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [0, 1, 4, 6])
@pytest.mark.parametrize("x", [ODD, INTS, INTS.to(torch.uint8), INTS.int(), ODD.bfloat16(), ODD.half(), ODD.double()])
def test_topk_values(x, k, largest):
    """torch leaves the order of ties open, so indices are checked through what they point at."""
    with _compat.enable_x64():
        values, indices = (to_torch(t) for t in lowerings.lookup(aten.topk.default).fn(to_jax(x), k, -1, largest))
    expected = aten.topk(x, k, -1, largest)[0]
    torch.testing.assert_close(values, expected, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(x.gather(1, indices), expected, equal_nan=True, rtol=0, atol=0)
    assert all(len(set(row)) == k for row in indices.tolist())


@together
def test_topk():
    check(aten.topk.default, X, 5)
    check(aten.topk.default, X, 2, 0, False)
    check(aten.topk.default, X.double(), 7, -1, False)
    check(aten.topk.default, T(3.0), 1)
    check(aten.topk.default, torch.zeros(0, 3), 2)


EDGES = T([-1.0, 0.0, 0.0, 2.0, 5.0])
VALUES = T([[0.0, -7.0, 9.0, 2.0], [NAN, INF, 0.5, 5.0]])
SEARCH = [
    (EDGES, VALUES),
    (EDGES, T(0.0)),
    (EDGES, T(1)),
    (EDGES.int(), VALUES.double()),
    (T([0.0, 1.0, NAN, NAN]), VALUES),
    (torch.stack([EDGES, EDGES + 1]), VALUES),
    (torch.stack([EDGES, EDGES + 1]), torch.zeros(2, 0)),
    (torch.zeros(0), VALUES),
    (T([3.0]), VALUES),
    (torch.arange(1000), T([[-3, 0, 512, 999, 1000]])),
    (X.sort().values, torch.randn(3, 9)),
]


@pytest.mark.core(keep=8)
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("args", SEARCH)
@together
def test_searchsorted(args, right):
    check(aten.searchsorted.Tensor, *args, right=right)
    if args[0].ndim == 1:
        check(aten.bucketize.Tensor, args[1], args[0], out_int32=True, right=right)


@together
def test_searchsorted_options():
    check(aten.searchsorted.Tensor, EDGES, VALUES, side="right", out_int32=True)
    check(aten.searchsorted.Scalar, EDGES, 2)
    check(aten.searchsorted.Scalar, EDGES, 2.5, side="left")
    check(aten.bucketize.Scalar, 2, EDGES, right=True)
    mixed = torch.randn(2, 6)
    check(aten.searchsorted.Tensor, mixed, torch.randn(2, 4), sorter=mixed.argsort(-1))


MANY = torch.arange(0, 60, 3)


@pytest.mark.parametrize("invert", [False, True])
@pytest.mark.parametrize("tests", [MANY, MANY[:4], MANY.double(), torch.zeros(0), T(3), torch.cat([MANY * 1.0, T([NAN])])])
@together
def test_isin(tests, invert):
    for x in (torch.arange(12).reshape(3, 4), T([NAN, 3.0, 2.5]), T(6), torch.zeros(0)):
        check(aten.isin.Tensor_Tensor, x, tests, invert=invert)
    check(aten.isin.Scalar_Tensor, 3, tests, invert=invert)
    check(aten.isin.Tensor_Scalar, MANY, 3, invert=invert)


HISTC = [
    (X, 10),
    (X, 5, -1, 1),
    (X, 7, 0.5, 0.5),
    (torch.ones(4), 4),
    (torch.zeros(0), 3),
    (ODD[1, 2:3].double(), 3, 0, 2),
    (EDGES, 6, -1, 5),
]


@pytest.mark.parametrize("args", HISTC)
@together
def test_histc(args):
    check(aten.histc.default, *args)


@together
def test_histc_ignores_nan():
    check(aten.histc.default, ODD, 4, -1, 1)


def test_histc_counts_integers_as_cuda_does():
    with _compat.enable_x64():
        counts = lowerings.lookup(aten.histc.default).fn(to_jax(torch.tensor([0, 1, 1, 3, 3, 3], dtype=torch.int32)), 4, 0, 3)
    assert counts.tolist() == [1, 2, 0, 3] and counts.dtype == "int32"


def test_lifted_numbers():
    import jax
    import jax.numpy as jnp

    with _compat.enable_x64():
        search, isin, histc = (lowerings.lookup(op).fn for op in (aten.searchsorted.Scalar, aten.isin.Tensor_Scalar, aten.histc.default))
        got = jax.jit(
            lambda v: (search(to_jax(EDGES), Scalar(int, v)), isin(to_jax(MANY), Scalar(int, v)), histc(to_jax(X), 3, 0, Scalar(int, v)))
        )(jnp.asarray(3))
    for g, e in zip(got, (torch.searchsorted(EDGES, 3), torch.isin(MANY, 3), torch.histc(X, 3, 0, 3)), strict=True):
        torch.testing.assert_close(to_torch(g), e)


@together
def test_gradients():
    check_grad(aten.sort.stable, X, stable=True, descending=True)
    check_grad(aten.topk.default, X, 5)
    check_grad(aten.topk.default, X, 2, 0, False)
