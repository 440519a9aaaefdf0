from __future__ import annotations

import jax
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
X = torch.randn(4, 5, 6)
I = torch.arange(12).reshape(3, 4)
S = torch.tensor(3.0)
A, B = T([0, -1, 2]), T([[1], [-2]])
MASK = T([True, False, True, False])
FULL = X > 0.3
EMPTY = torch.zeros(0, dtype=torch.int64)

INDEX = [
    (X, [A]),
    (X, [B]),
    (X, [None, A]),
    (X, [None, None, B]),
    (X, [A, B]),
    (X, [A, B, T(3)]),
    (X, [None, A, B]),
    (X, [A, None, B]),
    (X, [A, None, T(-1)]),
    (X, [T(1), None, T(-1)]),
    (X, [T(2)]),
    (X, [A.int()]),
    (X, [A.int(), B]),
    (X, [EMPTY]),
    (X, [None, EMPTY]),
    (torch.zeros(0, 3), [EMPTY]),
    (torch.zeros(3, 0), [A]),
    (X > 0, [None, A]),
    (X.bfloat16(), [A]),
    (torch.complex(X, X), [A, B]),
    (I, [T([[0, 2], [1, 1]]), T([3])]),
]


@pytest.mark.parametrize("args", INDEX)
@together
def test_index(args):
    check(aten.index.Tensor, *args)


@together
def test_unsafe_index():
    check(aten._unsafe_index.Tensor, X, [None, A])


@pytest.mark.parametrize("mask", [MASK, MASK.to(torch.uint8)])
def test_index_with_a_mask_says_what_to_do(mask):
    with pytest.raises(NotImplementedError, match=r"aten\.index\.Tensor with a boolean mask.*masked_fill"):
        lowerings.lookup(aten.index.Tensor).fn(to_jax(X), [to_jax(mask)])


PUT = [
    (X, [A], S),
    (X, [A], torch.randn(3, 5, 6)),
    (X, [A], torch.randn(6)),
    (X, [None, A], torch.randn(4, 3, 6)),
    (X, [A, None, T([0, 1, 2])], torch.randn(3, 5)),
    (X, [A, T([0, 1, 2])], torch.randn(3, 6)),
    (X, [T(1), None, T(-1)], torch.randn(5)),
    (X, [EMPTY], torch.randn(0, 5, 6)),
    (I, [A], T(7)),
    (X, [MASK], S),
    (X, [MASK], torch.randn(5, 6)),
    (X, [MASK], torch.randn(1, 5, 6)),
    (X, [MASK], torch.randn(2, 5, 6)),
    (X, [MASK], torch.randn(2, 1, 1)),
    (X, [None, T([True, False, True, True, False])], torch.randn(3, 6)),
    (X, [None, T([True, False, True, True, False])], torch.randn(4, 3, 1)),
    (X, [None, None, torch.zeros(6, dtype=torch.bool)], torch.randn(0)),
    (X, [FULL], S),
    (X, [FULL], torch.randn(int(FULL.sum()))),
    (X, [FULL[:, :, 0]], torch.randn(int(FULL[:, :, 0].sum()), 6)),
    (X, [None, FULL[0]], torch.randn(4, int(FULL[0].sum()))),
    (X, [None, FULL[0]], torch.randn(4, 1)),
    (I > 3, [A], T(True)),
]


@pytest.mark.core(keep=20)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("args", PUT)
@together
def test_index_put(args, accumulate):
    check(aten.index_put.default, *args, accumulate)


@together
def test_index_put_accumulates_duplicates():
    twice = T([1, 1, -3])
    check(aten.index_put.default, X, [twice], torch.randn(3, 5, 6), True)
    check(aten.index_put.default, X, [twice, None, twice], torch.randn(3, 5), True)
    check(aten.index_put.default, torch.zeros(4, dtype=torch.int64), [twice], T([1, 2, 3]), True)
    check(aten._unsafe_index_put.default, X, [twice], torch.randn(3, 5, 6), True)
    check(aten._index_put_impl.default, X, [A], S, False, True)


LARGE = torch.randn(4, 3, 64, 8)
FEW = [
    ([T([[0], [1]]), None, T([[7], [-1]])], (2, 1, 3, 8)),  # a token of two lines of a KV cache
    ([T([[1]]), None, T([[5, 6, 7]])], (1, 3, 3, 8)),  # three tokens of one
    ([None, None, T([63, 3])], (2, 8)),
    ([T(2)], (3, 64, 8)),
    ([T([1]), T([-1]), T([0]), T([7])], (1,)),
    ([T([3], dtype=torch.int32)], ()),
]


@pytest.mark.parametrize(("indices", "shape"), FEW)
@together
def test_index_put_of_a_few_slices_in_a_large_tensor(indices, shape):
    check(aten.index_put.default, LARGE, indices, torch.randn(shape))


@together
def test_index_copy_of_a_few_slices_in_a_large_tensor():
    check(aten.index_copy.default, LARGE, 2, T([9]), torch.randn(4, 3, 1, 8))
    check(aten.index_copy.default, LARGE.bfloat16(), 2, T([9, 0, 63]), torch.randn(4, 3, 3, 8).bfloat16())


@pytest.mark.parametrize("at", [64, -65, 2**40])
def test_a_slice_out_of_range_is_not_written(at):
    with _compat.enable_x64():
        found = lowerings.lookup(aten.index_put.default).fn(to_jax(LARGE), [None, None, to_jax(T([at, 2]))], to_jax(torch.ones(8)))
    expected = LARGE.clone()
    expected[:, :, 2] = 1
    assert torch.equal(to_torch(found), expected)


def test_a_cache_that_a_token_is_written_to_and_that_is_read_is_not_copied():
    put = lowerings.lookup(aten.index_put.default).fn

    def step(cache, new, at, query):
        cache = put(cache, [jax.numpy.zeros((1, 1), int), None, at], new)
        return cache, query @ cache.reshape(3, 512, 8).transpose(0, 2, 1)

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((1, 3, 512, 8), (1, 1, 3, 8))]
    shapes += [jax.ShapeDtypeStruct((1, 1), "int32"), jax.ShapeDtypeStruct((3, 1, 8), "float32")]
    compiled = jax.jit(step, donate_argnums=0).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 3 * 512 * 8


def test_index_put_with_a_mask_and_indices_says_what_to_do():
    with pytest.raises(NotImplementedError, match=r"aten\.index_put with a boolean mask beside other index tensors"):
        lowerings.lookup(aten.index_put.default).fn(to_jax(X), [to_jax(MASK), to_jax(T([0, 1]))], to_jax(S))


@together
def test_index_put_nan_does_not_leak_through_a_mask():
    check(aten.index_put.default, torch.full((4,), torch.nan), [MASK], T([1.0, 2.0]))


OTHERS = [
    (aten.index_select.default, (X, 1, T([3, 0, 0]))),
    (aten.index_select.default, (X, -1, T([3, 0], dtype=torch.int32))),
    (aten.index_select.default, (X, 0, T(2))),
    (aten.index_select.default, (S, 0, T([0]))),
    (aten.index_select.default, (X, 0, EMPTY)),
    (aten.index_add.default, (X, 1, T([3, 0, 0]), torch.randn(4, 3, 6))),
    (aten.index_add.default, (X, -1, T([3, 0, 0], dtype=torch.int32), torch.randn(4, 5, 3))),
    (aten.index_add.default, (S, 0, T([0]), T(2.0))),
    (aten.index_add.default, (I, 0, T([1, 1]), I[:2])),
    (aten.index_add.default, (X, 0, EMPTY, torch.zeros(0, 5, 6))),
    (aten.index_copy.default, (X, 1, T([3, 0]), torch.randn(4, 2, 6))),
    (aten.index_copy.default, (LARGE, 2, T([3]), torch.randn(4, 3, 1, 8))),
    (aten.index_copy.default, (torch.zeros(5), 0, T([3]), T([1.0]))),
    (aten.index_copy.default, (S, 0, T([0]), T(9.0))),
    (aten.index_fill.int_Scalar, (X, 1, T([3, -5]), 2)),
    (aten.index_fill.int_Scalar, (I, 1, T([0]), 2.9)),
    (aten.index_fill.int_Scalar, (S, 0, T([0]), 2)),
    (aten.index_fill.int_Scalar, (X > 0, 0, T([0]), 2)),
    (aten.index_fill.int_Tensor, (X, -1, T([3, 1]), T(8.0))),
    (aten.index_fill.int_Scalar, (X, 1, EMPTY, 2)),
    (aten.take.default, (X, T([[0, -1], [7, -120]]))),
    (aten.take.default, (S, T([0]))),
    (aten.take.default, (X, torch.zeros(2, 0, dtype=torch.int64))),
    (aten.put.default, (X, T([0, -1, 7]), T([1.0, 2.0, 3.0]))),
    (aten.put.default, (X, T([0, 0, 7]), T([1.0, 2.0, 3.0]), True)),
    (aten.put.default, (I, T([[0, 5]]), T([[8, 9]]))),
    (aten.nonzero_static.default, (I,), {"size": 20}),
    (aten.nonzero_static.default, (FULL,), {"size": 4, "fill_value": 9}),
    (aten.nonzero_static.default, (torch.zeros(0, 3),), {"size": 2}),
    (aten.repeat_interleave.Tensor, (T([2, 0, 3]),), {"output_size": 5}),
    (aten.repeat_interleave.Tensor, (T([2, 1], dtype=torch.int32),), {"output_size": 3}),
]


@pytest.mark.parametrize("case", OTHERS)
@together
def test_others(case):
    op, args, kwargs = case if len(case) == 3 else (*case, {})
    check(op, *args, **kwargs)


@together
def test_index_add_alpha():
    for x, source, alpha in (
        (X, torch.randn(4, 2, 6), 2.5),
        (X.bfloat16(), torch.randn(4, 2, 6).bfloat16(), 3),
        (X.long(), X[:, :2].long(), -2),
    ):
        check(aten.index_add.default, x, 1, T([1, 1]), source, alpha=alpha)


def test_repeat_interleave_without_a_size_says_what_to_do():
    with pytest.raises(NotImplementedError, match="output_size"):
        lowerings.lookup(aten.repeat_interleave.Tensor).fn(to_jax(T([1, 2])))


def test_lifted_numbers():
    import jax
    import jax.numpy as jnp

    with _compat.enable_x64():
        fill, add = (lowerings.lookup(op).fn for op in (aten.index_fill.int_Scalar, aten.index_add.default))
        got = jax.jit(lambda x, i, v: (fill(x, 0, i, Scalar(float, v)), add(x, 0, i, x[:1], alpha=Scalar(float, v))))(
            to_jax(X), to_jax(T([2])), jnp.asarray(2.5)
        )
    torch.testing.assert_close(to_torch(got[0]), X.index_fill(0, T([2]), 2.5))
    torch.testing.assert_close(to_torch(got[1]), X.index_add(0, T([2]), X[:1], alpha=2.5))


GRADS = [
    (aten.index.Tensor, (X, [A, None, T([1, 1, 1])])),
    (aten.index.Tensor, (X, [None, T([2, 2])])),
    (aten.index_put.default, (X, [T([1, 2])], torch.randn(2, 5, 6))),
    (aten.index_put.default, (X, [T([1, 1])], torch.randn(2, 5, 6), True)),
    (aten.index_put.default, (X, [FULL], torch.randn(int(FULL.sum())))),
    (aten.index_put.default, (X, [MASK], S)),
    (aten.index_select.default, (X, 1, T([3, 0, 0]))),
    (aten.index_add.default, (X, 1, T([3, 0, 0]), torch.randn(4, 3, 6))),
    (aten.index_copy.default, (X, 1, T([3, 0]), torch.randn(4, 2, 6))),
    (aten.index_copy.default, (LARGE, 2, T([3]), torch.randn(4, 3, 1, 8))),
    (aten.index_fill.int_Tensor, (X, 1, T([3, 0]), S)),
    (aten.take.default, (X, T([0, -1, 0]))),
    (aten.put.default, (X, T([0, -1]), T([1.0, 2.0]), True)),
]


@pytest.mark.parametrize(("op", "args"), GRADS)
@together
def test_gradients(op, args):
    check_grad(op, *args)
