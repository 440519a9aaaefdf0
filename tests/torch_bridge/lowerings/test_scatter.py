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
X = torch.randn(3, 4, 5)
SMALL = torch.randint(0, 4, (2, 6, 3))
SAME = torch.randint(0, 5, (3, 4, 5))
ONE = torch.randint(0, 5, (3, 4, 1))
UNIQUE = torch.stack([torch.randperm(5) for _ in range(12)]).reshape(3, 4, 5)[..., :3]
I = torch.arange(12).reshape(3, 4)
S = torch.tensor(3.0)
NONE = torch.zeros(0, dtype=torch.int64)

GATHER = [
    (X, 2, SAME),
    (X, -1, ONE),
    (X, 1, SMALL),
    (X, 0, torch.randint(0, 3, (7, 1, 2))),
    (I, 1, T([[3], [0], [1]])),
    (X > 0, 2, ONE),
    (X, 0, torch.zeros(0, 4, 5, dtype=torch.int64)),
    (X, 0, NONE),
    (S, 0, T(0)),
    (S, 0, T([0, 0])),
    (T([4.0, 5.0]), 0, T(1)),
    (torch.complex(X, X), 2, ONE),
    (X.bfloat16(), 2, SAME),
]


@pytest.mark.parametrize("args", GATHER)
@together
def test_gather(args):
    check(aten.gather.default, *args)


SCATTER = [
    (aten.scatter.src, (X, 2, UNIQUE, torch.randn(3, 4, 5))),
    (aten.scatter.src, (X, 2, UNIQUE[:2, 1:3], torch.randn(3, 3, 3))),
    (aten.scatter.src, (X, 0, NONE, torch.randn(1, 1, 1))),
    (aten.scatter.src, (S, 0, T(0), T(5.0))),
    (aten.scatter.src, (S, 0, T([0]), T([5.0]))),
    (aten.scatter.value, (X, 2, ONE, 2)),
    (aten.scatter.value, (I, 1, T([[1], [2]]), 2)),
    (aten.scatter.value, (I > 3, 1, T([[1], [2]]), 3)),
    (aten.scatter_add.default, (X, 1, SMALL[:, :4], torch.randn(2, 6, 3))),
    (aten.scatter_add.default, (X, 2, SAME, torch.randn(3, 4, 5))),
    (aten.scatter_add.default, (I, 1, T([[1, 1, 1]]), T([[1, 2, 3]]))),
    (aten.scatter_add.default, (S, 0, T([0]), T([2.0]))),
    (aten.scatter_add.default, (X, 2, torch.zeros(3, 4, 0, dtype=torch.int64), torch.zeros(3, 4, 0))),
]


@pytest.mark.parametrize(("op", "args"), SCATTER)
@together
def test_scatter(op, args):
    check(op, *args)


@together
def test_scatter_with_a_reduce_name():
    for name in ("add", "multiply"):
        check(aten.scatter.reduce, X, 2, SAME, torch.randn(3, 4, 5), reduce=name)
        check(aten.scatter.value_reduce, X, 2, ONE, 3, reduce=name)
        check(aten.scatter.value_reduce, I, 1, T([[1, 1]]), 3, reduce=name)


REDUCES = ["sum", "prod", "mean", "amax", "amin"]


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("name", REDUCES)
@together
def test_scatter_reduce(name, include_self):
    op, kw = aten.scatter_reduce.two, {"include_self": include_self}
    check(op, X, 2, SAME, torch.randn(3, 4, 5), name, **kw)
    check(op, X, 1, SMALL[:, :4], torch.randn(2, 6, 3), name, **kw)
    check(op, I - 5, 1, T([[1, 1, 2], [3, 3, 3]]), T([[-7, 2, 3], [-9, 4, 6]]), name, **kw)
    check(op, S, 0, T(0), T(2.0), name, **kw)
    check(op, X, 0, NONE, S.reshape(1, 1, 1), name, **kw)
    with_nan = torch.randn(3, 4, 5).masked_fill(X > 1, torch.nan).masked_fill(X < -1, torch.inf)
    check(op, X, 2, SAME, with_nan, name, **kw)
    check(op, X.double(), 2, SAME, with_nan.double(), name, **kw)
    if name != "mean":
        check(op, I > 4, 1, T([[1, 1, 2]]), T([[True, False, True]]), name, **kw)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("name", REDUCES[1:])
@pytest.mark.filterwarnings("ignore:index_reduce")
@together
def test_index_reduce(name, include_self):
    op, kw = aten.index_reduce.default, {"include_self": include_self}
    check(op, X, 1, T([3, 0, 0]), torch.randn(3, 3, 5), name, **kw)
    check(op, X, -1, T([3, 0, 0], dtype=torch.int32), torch.randn(3, 4, 3), name, **kw)
    check(op, I - 4, 0, T([1, 1]), I[:2] - 6, name, **kw)
    check(op, X, 1, NONE, torch.randn(3, 0, 5), name, **kw)


TIED = T([[1.0, 2.0, 2.0, 0.0, 5.0]])
TIED_AT, TIED_SRC = T([[1, 1, 3, 3, 4]]), T([[2.0, 1.0, 0.0, 3.0, 0.0]])


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("name", REDUCES)
@pytest.mark.filterwarnings("ignore:index_reduce")
@together
def test_reduce_gradients(name, include_self):
    check_grad(aten.scatter_reduce.two, X, 2, SAME, torch.randn(3, 4, 5), name, include_self=include_self)
    check_grad(aten.scatter_reduce.two, X, 1, SMALL[:, :4], torch.randn(2, 4, 3), name, include_self=include_self)
    check_grad(aten.scatter_reduce.two, TIED, 1, TIED_AT, TIED_SRC, name, include_self=include_self)
    if name != "sum":
        check_grad(aten.index_reduce.default, X, 1, T([3, 0, 0]), torch.randn(3, 3, 5), name, include_self=include_self)


GRADS = [
    (aten.gather.default, (X, 2, SAME)),
    (aten.gather.default, (X, 1, SMALL)),
    (aten.gather.default, (X, 2, ONE)),
    (aten.scatter.src, (X, 2, UNIQUE, torch.randn(3, 4, 3))),
    (aten.scatter.value, (X, 2, ONE, 2.0)),
    (aten.scatter_add.default, (X, 2, SAME, torch.randn(3, 4, 5))),
]


@pytest.mark.parametrize(("op", "args"), GRADS)
@together
def test_gradients(op, args):
    check_grad(op, *args)


def test_lifted_number():
    import jax
    import jax.numpy as jnp

    with _compat.enable_x64():
        fn = lowerings.lookup(aten.scatter.value).fn
        got = jax.jit(lambda x, i, v: fn(x, 2, i, Scalar(int, v)))(to_jax(X), to_jax(ONE), jnp.asarray(2))
    torch.testing.assert_close(to_torch(got), X.scatter(2, ONE, 2))
