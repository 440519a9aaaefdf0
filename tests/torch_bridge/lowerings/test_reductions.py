"""Sums, moments, norms, truth, extrema, order statistics and scans against eager torch."""

from __future__ import annotations

import pytest
import torch

import torch_bridge.lowerings as lowerings
from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.gradients import check_gradient
from tests.torch_bridge.lowerings.parity import check, to_jax, to_torch
from tests.torch_bridge.lowerings.test_arithmetic import BOOLS, COMPLEX, INTS, T, bf16, f16, f64, i32, inf, ints, nan, rand, u8
from torch_bridge import _compat

aten = torch.ops.aten
X = rand(3, 4, 5)
WIDE = rand(20, 300)
NANS = T([[1.0, nan, 3.0], [inf, -inf, 2.0], [inf, inf, 1.0], [-inf, -inf, -inf]])
TIES = T([[1, 3, 3, 2, 3], [0, 0, 0, 0, 0], [5, 4, 4, 5, 1]])
C = torch.complex(rand(3, 4), rand(3, 4))
DIMS = [(None, False), ([0], False), ([-1], True), ([0, 2], False), ([], False), ([1, -1], True)]
INPUTS = [X, X.to(bf16), X.to(f16), X.double(), ints(3, 4, 5), ints(3, 4, 5).to(u8), X > 0]


@pytest.mark.core(keep=8)
@pytest.mark.parametrize("x,dim,keepdim", [(x, *d) for i, x in enumerate(INPUTS) for d in (DIMS if i < 2 else DIMS[1:3])])
@together
def test_sums(x: torch.Tensor, dim: list | None, keepdim: bool) -> None:
    jit = x is INPUTS[1]
    check(aten.sum.dim_IntList, x, dim, keepdim, jit=jit)
    check(aten.nansum.default, x, dim, keepdim, jit=jit)
    if dim != []:
        check(aten.any.dims, x, dim, keepdim, jit=jit)
        check(aten.all.dims, x, dim, keepdim, jit=jit)
    check(aten.amax.default, x, dim or [], keepdim, jit=jit)
    check(aten.amin.default, x, dim or [], keepdim, jit=jit)
    if x.is_floating_point():
        check(aten.mean.dim, x, dim, keepdim, jit=jit)
        for name in ("var", "std", "var_mean", "std_mean"):
            check(getattr(aten, name).correction, x, dim, keepdim=keepdim, jit=jit)


OTHER = [
    (aten.sum.default, (X,), {"dtype": f64}),
    (aten.sum.default, (WIDE.to(bf16),), {}),
    (aten.sum.default, (WIDE,), {"dtype": bf16}),
    (aten.sum.default, (C,), {}),
    (aten.sum.dim_IntList, (ints(3, 4), [0]), {"dtype": torch.float32}),
    (aten.sum.dim_IntList, (torch.empty(0, 3), [0]), {}),
    (aten.sum.dim_IntList, (T(2.5), [0]), {}),
    (aten.sum.dim_IntList, (T(2.5), [-1], True), {}),
    (aten.nansum.default, (NANS,), {}),
    (aten.mean.default, (X,), {}),
    (aten.mean.default, (C,), {}),
    (aten.mean.default, (ints(7),), {"dtype": torch.float32}),
    (aten.mean.default, (torch.empty(0),), {}),
    (aten.mean.dim, (WIDE.to(bf16), [1]), {}),
    (aten.prod.default, (X,), {}),
    (aten.prod.default, (INTS + 8,), {}),
    (aten.prod.default, (BOOLS,), {}),
    (aten.prod.dim_int, (X.to(bf16), 1, True), {}),
    (aten.prod.dim_int, (torch.empty(0, 3), 0), {}),
    (aten.prod.dim_int, (C, -1), {}),
    (aten.prod.dim_int, (T(3.0), 0), {}),
    (aten.trace.default, (rand(3, 5),), {}),
    (aten.trace.default, (ints(4, 3, dtype=i32),), {}),
    (aten.count_nonzero.default, (NANS,), {}),
    (aten.count_nonzero.default, (INTS, 0), {}),
    (aten.count_nonzero.dim_IntList, (X > 0, [0, -1]), {}),
    (aten.any.default, (T([0, 2], dtype=u8),), {}),
    (aten.all.default, (NANS,), {}),
    (aten.any.dim, (COMPLEX, 0, True), {}),
    (aten.all.dim, (torch.empty(0, 2), 0), {}),
    (aten.all.default, (T(2, dtype=u8),), {}),
    (aten.any.dims, (X, []), {}),
    (aten.all.dims, (X > 0, []), {}),
    (aten.any.dims, (X,), {}),
    (aten._is_all_true.default, (BOOLS,), {}),
    (aten._is_any_true.default, (BOOLS,), {}),
    (aten.var.correction, (T([1.0]),), {}),
    (aten.var.correction, (T([1.0, 2.0]),), {"correction": 5}),
    (aten.var.correction, (T([1.0, 2.0, 4.0]),), {"correction": 0.5}),
    (aten.var.correction, (X, [1]), {"correction": 0}),
    (aten.var.correction, (torch.empty(0),), {}),
    (aten.var.correction, (C, [1]), {}),
    (aten.std_mean.correction, (C, [0]), {"keepdim": True}),
    (aten.var_mean.correction, (T(3.0),), {"correction": 0}),
    (aten.var.correction, (WIDE + 1000,), {}),
    (aten.logsumexp.default, (X, [1]), {}),
    (aten.logsumexp.default, (X, [0, -1], True), {}),
    (aten.logsumexp.default, (NANS, [1]), {}),
    (aten.logsumexp.default, (X.to(bf16), [1]), {}),
    (aten.logsumexp.default, (ints(3, 4), [0]), {}),
    (aten.logsumexp.default, (torch.empty(0, 2), [0]), {}),
    (aten.logsumexp.default, (T(3.0), [0]), {}),
    (aten.logsumexp.default, (C, [1]), {}),
    (aten.logsumexp.default, (WIDE * 100, [1]), {}),
]


@pytest.mark.parametrize("op,args,kwargs", OTHER)
@together
def test_reduction(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> None:
    check(op, *args, **kwargs)


@pytest.mark.core(keep=4)
@pytest.mark.parametrize("p", [0, 1, 2, 3, 0.5, -1, -2.5, inf, -inf])
@together
def test_norms(p: float) -> None:
    check(aten.linalg_vector_norm.default, X, p)
    check(aten.linalg_vector_norm.default, X, p, [0, -1], True, jit=False)
    check(aten.linalg_vector_norm.default, C, p, [0], jit=False)
    check(aten.linalg_vector_norm.default, WIDE.to(bf16), p, [1], jit=False)
    check(aten.linalg_vector_norm.default, X.to(bf16), p, dtype=torch.float32, jit=False)
    check(aten.linalg_vector_norm.default, NANS[:2], p, [1], jit=False)
    check(aten.linalg_vector_norm.default, T([[0.0, 0.0], [0.0, 3.0]]), p, [1], jit=False)
    check(aten.norm.ScalarOpt_dim, X, p, [1], jit=False)
    check(aten.norm.Scalar, X, p, jit=False)
    check(aten.dist.default, X, torch.randn(5), p, jit=False)
    if p > 0:
        check(aten.renorm.default, X, p, 1, 1.5, jit=False)
        check_gradient(aten.linalg_vector_norm.default, T([[0.0, 0.0], [0.0, 3.0], [-2.0, 2.0]]), p, [1])


@together
def test_norm_variants() -> None:
    check(aten.norm.ScalarOpt_dim, X, None, [0])
    check(aten.norm.ScalarOpt_dtype, X, 2, dtype=f64)
    check(aten.norm.ScalarOpt_dim_dtype, X, 2, [0], True, dtype=f64)
    check(aten.linalg_vector_norm.default, X, 2, [])
    check(aten.linalg_vector_norm.default, T(-3.0), 2)
    check(aten.linalg_vector_norm.default, torch.empty(0), 2)
    check(aten.linalg_vector_norm.default, torch.empty(0, 2), inf, [1])
    check(aten.linalg__powsum.default, X, 3, [0])
    check(aten.renorm.default, X.to(bf16), 2, -1, 0.5)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 1.5, 3.0, inf])
@together
def test_cdist(p: float) -> None:
    a, b = torch.randn(2, 6, 4), torch.randn(2, 5, 4)
    b[0, 0] = a[0, 0]
    check(aten._cdist_forward.default, a, b, p, None)
    check(aten._cdist_forward.default, a.double(), b[:1].double(), p, 2, jit=False)
    distance = torch.cdist(a, b, p=p)
    check(aten._cdist_backward.default, torch.randn(2, 6, 5), a, b, p, distance)


@together
def test_cdist_by_matmul() -> None:
    a, b = torch.randn(30, 4), torch.randn(40, 4)
    check(aten._cdist_forward.default, a, b, 2.0, None, rtol=1e-5, atol=1e-5)
    check(aten._cdist_forward.default, a, b, 2.0, 2)
    check(aten._euclidean_dist.default, a, b, rtol=1e-5, atol=1e-5)
    check(aten._cdist_forward.default, torch.empty(0, 3), torch.randn(2, 3), 2.0, None)
    check(aten._cdist_forward.default, torch.empty(2, 0), torch.empty(3, 0), 2.0, None)


EXTREMA_INPUTS = [X, NANS, TIES, TIES.to(bf16), TIES.to(u8), T([[3.0, 3.0]]), T([[1.0, nan, 3.0, nan]])]


@pytest.mark.thorough(keep=5)
@pytest.mark.parametrize("x,dim", [(TIES, 0), (NANS, 0), *((x, -1) for x in EXTREMA_INPUTS)])
@together
def test_extrema(x: torch.Tensor, dim: int) -> None:
    for name in ("max", "min"):
        check(getattr(aten, name).dim, x, dim, jit=x is TIES)
        check(getattr(aten, name).dim, x, dim, True, jit=False)
        check(getattr(aten, name).default, x, jit=False)
        arg = getattr(aten, f"arg{name}").default
        check(arg, x, dim, jit=False)
        check(arg, x, dim, True, jit=False)
        check(arg, x, jit=False)
        check(arg, x, None, True, jit=False)
    check(aten.aminmax.default, x, dim=dim, keepdim=True, jit=False)
    check(aten.aminmax.default, x, jit=False)
    check(aten._aminmax.dim, x, dim, jit=False)
    for op in (aten.median, aten.nanmedian):
        check(op.dim, x, dim, jit=x is TIES)
        check(op.dim, x, dim, True, jit=False)
        check(op.default, x, jit=False)
    if not x.isnan().any():
        check(aten.mode.default, x, dim, jit=x is TIES)
    check(aten.cummax.default, x, dim, jit=x is TIES)
    check(aten.cummin.default, x, dim, jit=False)


@together
def test_extrema_of_bools_and_single_values() -> None:
    for op in (aten.max.dim, aten.min.dim, aten.mode.default, aten.cummax.default, aten.cummin.default):
        check(op, BOOLS, 0)
        check(op, T(3.0), 0)
    for op in (aten.max.default, aten.amax.default, aten.aminmax.default):
        check(op, BOOLS)
        check(op, T(3.0))
    check(aten.argmax.default, T(3.0))
    check(aten.argmin.default, T(3.0), 0)
    check(aten.median.dim, T(3.0), 0)
    check(aten.median.default, torch.empty(0))
    check(aten.kthvalue.default, T(3.0), 1)
    check(aten.nanmedian.dim, T([[nan, nan], [nan, 2.0]]), 1)
    check(aten.cummax.default, torch.empty(0, 2), 0)
    check(aten.median.dim, torch.empty(0, 3), 1)


@together
def test_mode_and_median_of_longer_rows() -> None:
    x = torch.randint(0, 6, (40, 60))
    check(aten.median.dim, x, 1)
    check(aten.median.dim, x.float(), 0)


def test_mode_of_longer_rows_and_of_nan() -> None:
    """torch's index is then whatever its unstable sort leaves; ours is the last position of the value."""
    x = torch.randint(0, 6, (40, 60))
    mode = lowerings.lookup(aten.mode.default).fn
    with _compat.enable_x64():
        values, index = (to_torch(y) for y in mode(to_jax(x), 1))
        with_nan = [float(y) for y in mode(to_jax(T([nan, 2.0, nan, 2.0, 1.0, 1.0])))]
    assert values.equal(x.mode(1).values)
    assert index.equal(59 - (x == values[:, None]).flip(1).int().argmax(1))
    assert with_nan == [1.0, 5]


@together
def test_kthvalue() -> None:
    x = torch.randperm(60).reshape(4, 15).float()
    for k in (1, 7, 15):
        check(aten.kthvalue.default, x, k)
        check(aten.kthvalue.default, x.T.contiguous(), k, 0, True, jit=False)


SCANNED = [X, X.to(bf16), X.double(), ints(3, 4, 5), ints(3, 4, 5).to(u8), X > 0, C, torch.empty(0, 2), T(2.5), NANS]


@pytest.mark.parametrize("x", SCANNED)
@together
def test_scans(x: torch.Tensor) -> None:
    for op in (aten.cumsum.default, aten.cumprod.default):
        check(op, x, 0)
        check(op, x, -1, jit=False)
    check(aten.cumsum.default, x, -1, dtype=torch.complex128 if x.is_complex() else f64, jit=False)
    if x.is_floating_point():
        check(aten.logcumsumexp.default, x, 0)
        check(aten._logcumsumexp.default, x, -1, jit=False)


def test_unsupported_scan_says_what_to_do() -> None:
    with pytest.raises(NotImplementedError, match=r"logcumsumexp.*complex.*cumsum"):
        check(aten.logcumsumexp.default, C, 0)


TIED = TIES.float()
GRADIENTS = [
    (aten.sum.dim_IntList, (X, [1])),
    (aten.mean.dim, (X, [0, 2])),
    (aten.nansum.default, (T([1.0, nan, 2.0]),)),
    (aten.prod.dim_int, (T([[1.0, 0.0, 3.0], [0.0, 0.0, 2.0], [1.0, 2.0, 3.0]]), 1)),
    (aten.var.correction, (X, [1])),
    (aten.std.correction, (T([[1.0, 1.0], [1.0, 3.0]]), [1])),
    (aten.logsumexp.default, (X, [1])),
    (aten.amax.default, (TIED, [1])),
    (aten.amin.default, (TIED, [0, 1])),
    (aten.max.default, (TIED,)),
    (aten.max.dim, (TIED, 1)),
    (aten.min.dim, (TIED, 0)),
    (aten.median.dim, (TIED, 1)),
    (aten.kthvalue.default, (X, 2)),
    (aten.mode.default, (TIED, 1)),
    (aten.cumsum.default, (X, 1)),
    (aten.cumprod.default, (X, 1)),
    (aten.logcumsumexp.default, (X, 1)),
    (aten.cummax.default, (TIED, 1)),
    (aten.cummin.default, (TIED, 0)),
    (aten.dist.default, (X, X.flip(0))),
    (aten.renorm.default, (X, 2, 1, 1.5)),
    (aten.trace.default, (rand(3, 5),)),
]


@pytest.mark.parametrize("op,args", GRADIENTS)
@together
def test_gradient(op: torch._ops.OpOverload, args: tuple) -> None:
    check_gradient(op, *args, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, inf])
@together
def test_cdist_gradient(p: float) -> None:
    check_gradient(aten._cdist_forward.default, torch.randn(3, 4), torch.randn(2, 4), p, None, rtol=1e-5, atol=1e-5)
