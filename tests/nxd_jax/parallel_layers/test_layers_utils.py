"""A linear layer, and Q, K and V projections, written with the steps that upstream's tests import, against unsharded ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm

from nxd_jax.modules import qkv_linear_utils as qkv
from nxd_jax.parallel_layers import layers_utils, parallel_state
from tests.nxd_jax.conftest import Nxd
from torch_bridge.recorder import sharded

TP, SEQ, IN, OUT = 2, 4, 3, 6


class Linear(torch.autograd.Function):
    """Column-parallel, [seq, batch, in] x [out / tp, in]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, reduce: bool, dim: int | None, dtype: torch.dtype) -> torch.Tensor:
        whole = layers_utils._linear_autograd_base_setup_fwd(ctx, x, weight, None, reduce, dim is not None, dim, reduce_dtype=dtype)
        return whole @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, grad = layers_utils._linear_autograd_base_setup_bwd(ctx, grads)
        wide = grad @ weight
        if x is None:
            return layers_utils._linear_autograd_bwd_no_weight_grad(ctx, wide, wide.dtype), None, None, None, None
        handle = layers_utils._linear_autograd_bwd_grad_reduce(ctx, wide, wide.dtype)
        part, wide = layers_utils._linear_autograd_bwd_input_grad(ctx, wide, handle, wide.dtype)
        return wide if part is None else part, grad.flatten(0, 1).T @ x.flatten(0, 1), None, None, None


def share(t: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's part."""
    rank, size = parallel_state.get_tensor_model_parallel_rank(), t.shape[dim] // TP
    return t.to("xla").narrow(dim, rank * size, size).contiguous()


F32, F64 = torch.float32, torch.float64


@pytest.mark.parametrize(
    ("dim", "dtype", "trains"), [(None, F32, True), (None, F64, True), (0, F32, True), (1, F64, True), (0, F64, False), (1, F32, False)]
)
def test_linear(nxd: Nxd, dim: int | None, dtype: torch.dtype, trains: bool) -> None:
    nxd(TP, tp=TP)
    torch.manual_seed(0)
    x, weight, ahead = torch.randn(SEQ, 2, IN), torch.randn(OUT, IN), torch.randn(SEQ, 2, OUT)
    want_x, want_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    (want_x @ want_weight.T * ahead).sum().backward()
    own = (x.to("xla") if dim is None else share(x, dim)).requires_grad_()
    part = share(weight, 0).requires_grad_(trains)
    (Linear.apply(own, part, dim is None, dim, dtype) * share(ahead, 2)).sum().backward()
    assert own.grad is not None and want_x.grad is not None and want_weight.grad is not None
    for rank in range(TP):
        expected = want_x.grad if dim is None else want_x.grad.chunk(TP, dim)[rank]
        torch.testing.assert_close(sharded.shards(own.grad)[rank], expected)
        if trains:
            assert part.grad is not None
            torch.testing.assert_close(sharded.shards(part.grad)[rank], want_weight.grad.chunk(TP)[rank])


class Projections(torch.autograd.Function):
    """K and V of one head, which both ranks hold, and Q of one head on each."""

    @staticmethod
    def forward(ctx: Any, x: Any, q: Any, k: Any, v: Any, sequence: bool) -> Any:
        whole = qkv._qkvlinear_autograd_base_setup_fwd(ctx, x, q, k, v, None, None, None, not sequence, sequence, TP)
        assert not ctx.use_bias
        return whole @ q.T, whole @ k.T, whole @ v.T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, fused, q, k, v, grad_k, grad_v = qkv._qkvlinear_autograd_base_setup_bwd(ctx, *grads)
        assert fused is None and x is not None
        wide = grads[0] @ q + grads[1] @ k + grads[2] @ v
        weights = [g.flatten(0, 1).T @ x.flatten(0, 1) for g in (grads[0], grad_k, grad_v)]
        wide = qkv._qkvlinear_autograd_bwd_grad_reduce(ctx, wide, wide.dtype)
        if ctx.sequence_parallel_enabled:
            wide = qkv._qkvlinear_autograd_bwd_input_grad(ctx, wide, wide.dtype)
        return wide, *weights, None


@pytest.mark.parametrize("sequence", [False, True])
def test_projections(nxd: Nxd, sequence: bool) -> None:
    nxd(TP, tp=TP)
    parallel_state.initialize_kv_group(TP)
    torch.manual_seed(0)
    x, q, k, v = torch.randn(SEQ, 2, IN), torch.randn(OUT, IN), torch.randn(2, IN), torch.randn(2, IN)
    aq, ak, av = torch.randn(SEQ, 2, OUT), torch.randn(TP, SEQ, 2, 2), torch.randn(TP, SEQ, 2, 2)
    want = [t.clone().requires_grad_() for t in (x, q, k, v)]
    wx, wq, wk, wv = want
    sum((a * b).sum() for a, b in ((wx @ wq.T, aq), (wx @ wk.T, ak.sum(0)), (wx @ wv.T, av.sum(0)))).backward()  # type: ignore[union-attr]
    own = [share(x, 0) if sequence else x.to("xla"), share(q, 0), k.to("xla"), v.to("xla")]
    for t in own:
        t.requires_grad_()
    outs = Projections.apply(*own, sequence)
    ahead = (share(aq, 2), share(ak, 0)[0], share(av, 0)[0])
    sum((a * b).sum() for a, b in zip(outs, ahead, strict=True)).backward()  # type: ignore[union-attr]
    for n, (found, expected) in enumerate(zip(own, want, strict=True)):
        assert found.grad is not None and expected.grad is not None
        parted = n == 1 or (n == 0 and sequence)
        for rank, value in enumerate(sharded.shards(found.grad)):
            torch.testing.assert_close(value, expected.grad.chunk(TP)[rank] if parted else expected.grad, rtol=1e-4, atol=1e-5)
    parallel_state.destroy_kv_group()


def test_weights_that_do_not_train(nxd: Nxd) -> None:
    """A fused weight is then all that is kept, and the gradient is scattered."""
    nxd(TP, tp=TP)
    saved: list[Any] = []
    ctx = SimpleNamespace(save_for_backward=lambda *tensors: saved.extend(tensors))
    x, weight = torch.ones(SEQ, 1, IN, device="xla"), torch.ones(OUT, IN, device="xla")
    out = qkv._qkvlinear_autograd_base_setup_fwd(ctx, x, None, None, None, None, None, None, False, False, 1, weight, weight, True)
    assert out is x and saved == [weight] and not ctx.use_bias and not ctx.compute_weight_gradient
    ctx.saved_tensors = tuple(saved)
    whole, fused, q, *_ = qkv._qkvlinear_autograd_base_setup_bwd(ctx, x, x, x)
    assert whole is None and fused is weight and q is None
    part = qkv._qkvlinear_autograd_bwd_no_weight_grad(ctx, x, torch.float64)
    assert part.shape == (SEQ // TP, 1, IN) and part.dtype == torch.float64 and part.flatten()[0].item() == TP
    ctx.async_grad_allreduce = True
    with pytest.raises(AssertionError, match="exclude each other: the gradient is either summed or scattered"):
        qkv._qkvlinear_autograd_bwd_no_weight_grad(ctx, x, torch.float32)
    with pytest.raises(AssertionError, match="exclude each other"):
        layers_utils._linear_autograd_bwd_no_weight_grad(ctx, x, torch.float32)
    with pytest.raises(AssertionError, match="sequence_parallel_enabled=True needs a sequence_dimension, got None"):
        layers_utils._linear_autograd_base_setup_fwd(ctx, x, weight, None, False, True, None)
    xm.mark_step()
