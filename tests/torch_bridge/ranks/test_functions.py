"""`torch_xla.core.functions` on a world of four: whose gradients are exchanged, the distributed product, and batch norm over all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_xla.core.functions as xf
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_backend  # noqa: F401
from torch import nn

from tests.torch_bridge.ranks import eager
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge import metrics

RANKS = 4


@pytest.fixture(autouse=True)
def four_ranks(hosted: Hosted) -> None:
    hosted(RANKS, dp=2, tp=2)


def _values(*shape: int) -> list[torch.Tensor]:
    return eager.each(lambda r: torch.randn(shape, generator=torch.Generator().manual_seed(r)))


def test_the_gradient_of_a_reduction_is_each_rank_s_own() -> None:
    """torch_xla multiplies it with the scale and exchanges nothing."""
    x = eager.on_xla(eager.each(lambda r: torch.tensor([r + 1.0]))).requires_grad_()
    weight = xm.get_ordinal() + 1
    (grad,) = torch.autograd.grad((xf.all_reduce("sum", x, scale=0.5) * weight).sum(), x)
    eager.same(grad, eager.each(lambda r: torch.tensor([0.5 * (r + 1)])))
    (grad,) = torch.autograd.grad((xf.all_reduce(xm.REDUCE_SUM, x, groups=[[0, 1], [2, 3]]) * weight).sum(), x)
    eager.same(grad, eager.each(lambda r: torch.tensor([r + 1.0])))
    (grad,) = torch.autograd.grad((xf.all_reduce(xm.REDUCE_MUL, x) * weight).sum(), x)
    eager.same(grad, eager.each(lambda r: torch.tensor([24.0])))  # 4! / (r + 1) * (r + 1)
    (grad,) = torch.autograd.grad((xf.all_reduce(xm.REDUCE_MAX, x) * weight).sum(), x)
    eager.same(grad, eager.each(lambda r: torch.tensor([4.0 if r == 3 else 0.0])))


def test_a_product_with_a_zero_has_no_gradient_there_and_bits_none_at_all() -> None:
    x = eager.on_xla(eager.each(lambda r: torch.tensor([float(r)]))).requires_grad_()
    (grad,) = torch.autograd.grad(xf.all_reduce(xm.REDUCE_MUL, x).sum(), x)
    assert grad.tolist() == [0.0]

    class Context:
        arguments = "and", 1.0
        saved_tensors = (x, x)

    with pytest.raises(RuntimeError, match="all_reduce of type 'and' has no gradient"):
        xf._AllReduce.backward(Context(), x)


@pytest.mark.parametrize("split", [1, 2])
def test_distributed_mm(split: int) -> None:
    """The whole factor times each rank's columns."""
    ws, xs = _values(3, 2), _values(2 * RANKS, 4)
    whole = torch.cat(ws, 1)
    w, x = eager.on_xla(ws).requires_grad_(), eager.on_xla(xs).requires_grad_()
    out = xf.distributed_mm(w, x, split)
    eager.same(out, [whole @ x for x in xs])
    out.sum().backward()
    assert w.grad is not None and x.grad is not None
    eager.same(w.grad, [torch.ones(3, 4) @ xs[r][2 * r : 2 * r + 2].T for r in range(RANKS)])  # of its own columns: nothing is exchanged


def test_distributed_mm_says_what_does_not_fit() -> None:
    w = torch.ones(3, 2, device="xla")
    with pytest.raises(ValueError, match=r"w of shape \[3, 2\], 4 ranks and split=1, x must have 8 rows .* its shape is \[6, 4\]"):
        xf.distributed_mm(w, torch.ones(6, 4, device="xla"))
    with pytest.raises(ValueError, match="split=3.*columns that divides by 3"):
        xf.distributed_mm(w, torch.ones(8, 4, device="xla"), split=3)


def _train(module: nn.Module, batches: list[Any], weights: Any) -> list[torch.Tensor]:
    """Outputs of three steps, the last's gradients, and the statistics."""
    for x in batches:
        x.requires_grad_()
        out = module(x)
        module.zero_grad()
        x.grad = None
        (out * weights).sum().backward()
    return [out, x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("shape", [(3, 2), (2, 2, 3), (2, 2, 2, 2), (1, 2, 2, 1, 2)])
def test_batch_norm_over_all_ranks(shape: tuple[int, ...]) -> None:
    """What batch norm computes of the batches side by side; running variances are biased, as torch_xla's."""
    parts = [[torch.randn(shape, generator=torch.Generator().manual_seed(10 * k + r)) for r in range(RANKS)] for k in range(3)]
    weights = _values(*shape)
    ours, whole = xf.SyncBatchNorm(2, momentum=0.2).to("xla"), nn.BatchNorm1d(2, momentum=0.2)
    whole._check_input_dim = lambda input: None  # type: ignore[method-assign]
    out, grad, *grads = _train(ours, [eager.on_xla(p) for p in parts], eager.on_xla(weights))
    expected, expected_grad, *expected_grads = _train(whole, [torch.cat(p) for p in parts], torch.cat(weights))
    eager.same(out, list(expected.detach().split(shape[0])), rtol=1e-4, atol=1e-5)
    eager.same(grad, list(expected_grad.split(shape[0])), rtol=1e-3, atol=1e-4)
    for mine, theirs in zip(grads, expected_grads, strict=True):
        total = xm.all_reduce("sum", mine)
        torch.testing.assert_close(total.cpu(), theirs, rtol=1e-4, atol=1e-4)
    assert whole.running_mean is not None
    torch.testing.assert_close(ours.running_mean.cpu(), whole.running_mean, rtol=1e-5, atol=1e-6)
    var = torch.ones(2)
    for part in parts:
        everyone = torch.cat(part)
        var = 0.8 * var + 0.2 * everyone.var([d for d in range(everyone.ndim) if d != 1], correction=0)
    torch.testing.assert_close(ours.running_var.cpu(), var, rtol=1e-5, atol=1e-6)
    ours.eval()
    x = parts[0][0]
    by_hand = nn.functional.batch_norm(x, ours.running_mean.cpu(), ours.running_var.cpu(), eps=ours.eps)
    torch.testing.assert_close(ours(x.to("xla")).detach().cpu(), by_hand, rtol=1e-4, atol=1e-5)


def test_batch_norm_says_what_it_takes() -> None:
    module = xf.SyncBatchNorm(2)
    assert set(module.state_dict()) == {"weight", "bias", "running_mean", "running_var"} and repr(module) == "SyncBatchNorm(2, eps=1e-05)"
    with pytest.raises(ValueError, match=r"SyncBatchNorm\(2\) takes 2 to 5 dims, dim 1 of size 2; got \[2, 3\]"):
        module(torch.ones(2, 3))


@pytest.mark.parametrize("mesh", [None, [[0, 1], [2, 3]]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_s_sync_batch_norm(mesh: Any, dtype: torch.dtype) -> None:
    """`nn.SyncBatchNorm` is batch norm of the batches of its group, forward and backward, and runs as one graph."""
    dist.init_process_group("xla")
    try:
        group = None if mesh is None else dist.new_group(mesh[0], pg_options={"xla_pg_options": {"mesh": mesh}})
        groups = mesh or [list(range(RANKS))]
        parts = [[torch.randn((3, 2, 2), generator=torch.Generator().manual_seed(10 * k + r)) for r in range(RANKS)] for k in range(2)]
        parts, weights = [[x.to(dtype) for x in p] for p in parts], [w.to(dtype) for w in _values(3, 2, 2)]
        ours: Any = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2), group).to("xla")
        before = metrics.EXECUTE_TIME.count
        out, grad, *grads = _train(ours, [eager.on_xla(p) for p in parts], eager.on_xla(weights))
        assert metrics.EXECUTE_TIME.count == before
        wholes = [nn.BatchNorm1d(2) for _ in groups]
        close = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
        found: dict[int, Any] = {}
        for whole, members in zip(wholes, groups, strict=True):
            batches = [torch.cat([p[r] for r in members]) for p in parts]
            expected, expected_grad, *expected_grads = _train(whole, batches, torch.cat([weights[r] for r in members]))
            for place, r in enumerate(members):
                found[r] = expected.detach()[3 * place : 3 * place + 3], expected_grad[3 * place : 3 * place + 3], expected_grads, whole
        eager.same(out, [found[r][0] for r in range(RANKS)], **close)
        eager.same(grad, [found[r][1] for r in range(RANKS)], **close)
        eager.same(xm.all_reduce("sum", grads[0], groups=groups), [found[r][2][0] for r in range(RANKS)], **close)
        eager.same(ours.running_mean, [found[r][3].running_mean for r in range(RANKS)], **close)
        eager.same(ours.running_var, [found[r][3].running_var for r in range(RANKS)], **close)
    finally:
        dist.destroy_process_group()
