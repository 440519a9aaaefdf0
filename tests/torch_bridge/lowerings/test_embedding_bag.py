"""`_embedding_bag` as off CPU: torch's CPU kernels leave some side results empty, so only the meaning is compared."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import torch_bridge.lowerings as lowerings
from tests.torch_bridge.lowerings.parity import to_jax, to_torch
from torch_bridge import _compat

aten = torch.ops.aten
torch.manual_seed(0)
W = torch.randn(7, 4)
I = torch.tensor([1, 2, 2, 5, 0, 2, 6, 3])
OFFSETS = torch.tensor([0, 3, 3, 6])
MODES = ["sum", "mean", "max"]


def run(op, *args):
    import jax

    with _compat.enable_x64():
        fn = lowerings.lookup(op).fn
        at = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]

        def call(arrays):
            filled = list(args)
            for i, a in zip(at, arrays, strict=True):
                filled[i] = a
            return fn(*filled)

        return jax.tree.map(to_torch, jax.jit(call)([to_jax(args[i]) for i in at]))


def reference(mode, offsets, **kwargs):
    weight = W.clone().requires_grad_()
    out = F.embedding_bag(I, weight, offsets, mode=mode, **kwargs)
    grad = torch.randn_like(out)
    return out.detach(), grad, torch.autograd.grad(out, weight, grad)[0]


@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding_idx", [-1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_forward_and_backward(mode, padding_idx, last):
    offsets = torch.cat([OFFSETS, torch.tensor([8])]) if last else OFFSETS
    out, grad, expected = reference(mode, offsets, padding_idx=None if padding_idx < 0 else padding_idx, include_last_offset=last)
    number = MODES.index(mode)
    got, bags, sizes, winners = run(aten._embedding_bag.default, W, I, offsets, False, number, False, None, last, padding_idx)
    torch.testing.assert_close(got, out)
    assert bags.tolist() == [0, 0, 0, 2, 2, 2, 3, 3]
    metas = aten._embedding_bag(*(x.to("meta") for x in (W, I, offsets)), False, number, False, None, last, padding_idx)
    assert [t.shape for t in metas] == [t.shape for t in (got, bags, sizes, winners)]
    assert [t.dtype for t in metas] == [t.dtype for t in (got, bags, sizes, winners)]
    back = run(aten._embedding_bag_dense_backward.default, grad, I, bags, sizes, winners, 7, False, number, None, padding_idx)
    torch.testing.assert_close(back, expected)
    back = run(aten._embedding_bag_backward.default, grad, I, offsets, bags, sizes, winners, 7, False, number, False, None, padding_idx)
    torch.testing.assert_close(back, expected)


@pytest.mark.parametrize("mode", MODES[:2])
def test_scale_grad_by_freq(mode):
    """Against `F.embedding`: torch's CPU kernel divides by the count of another index (`counts[indices_data[i]]`)."""
    weight, bags = W.clone().requires_grad_(), torch.tensor([0, 0, 0, 2, 2, 2, 3, 3])
    out = torch.zeros(4, 4).index_add(0, bags, F.embedding(I, weight, scale_grad_by_freq=True))
    out = out / torch.tensor([[3], [1], [3], [2]]) if mode == "mean" else out
    grad = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, weight, grad)
    got, bags, sizes, winners = run(aten._embedding_bag.default, W, I, OFFSETS, True, MODES.index(mode))
    torch.testing.assert_close(got, out.detach())
    back = run(aten._embedding_bag_dense_backward.default, grad, I, bags, sizes, winners, 7, True, MODES.index(mode), None)
    torch.testing.assert_close(back, expected)


def test_per_sample_weights():
    weight, each = W.clone().requires_grad_(), torch.randn(8, requires_grad=True)
    out = F.embedding_bag(I, weight, OFFSETS, mode="sum", per_sample_weights=each, padding_idx=2)
    grad = torch.randn_like(out)
    by_weight, by_each = torch.autograd.grad(out, [weight, each], grad)
    got, bags, sizes, winners = run(aten._embedding_bag.default, W, I, OFFSETS, False, 0, False, each.detach(), False, 2)
    torch.testing.assert_close(got, out.detach())
    back = run(aten._embedding_bag_dense_backward.default, grad, I, bags, sizes, winners, 7, False, 0, each.detach(), 2)
    torch.testing.assert_close(back, by_weight)
    back = run(aten._embedding_bag_per_sample_weights_backward.default, grad, W, I, OFFSETS, bags, 0, 2)
    torch.testing.assert_close(back, by_each)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_no_indices(number):
    none = torch.zeros(0, dtype=torch.int64)
    got, *_ = run(aten._embedding_bag_forward_only.default, W, none, torch.zeros(2, dtype=torch.int64), False, number)
    assert torch.equal(got, torch.zeros(2, 4))


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_of_sparse_is_dense(mode):
    bag = torch.nn.EmbeddingBag(7, 4, mode=mode, sparse=mode != "max")
    xla = copy.deepcopy(bag).to("xla")
    bag.sparse = False
    for module, device in ((bag, "cpu"), (xla, "xla")):
        module(I.to(device), OFFSETS.to(device)).square().sum().backward()
    assert xla.weight.grad.layout == torch.strided
    torch.testing.assert_close(xla.weight.grad.cpu(), bag.weight.grad)
