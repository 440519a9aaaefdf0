from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch

from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.nn_checks import check_gradients
from tests.torch_bridge.lowerings.parity import check, to_jax, to_torch
from torch_bridge import _compat
from torch_bridge.lowerings import lookup
from torch_bridge.lowerings.attention import attention

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
FUSED = lookup(aten._scaled_dot_product_fused_attention_overrideable.default)
BACK = lookup(aten._scaled_dot_product_fused_attention_overrideable_backward.default)
torch.manual_seed(0)
Q, K, V = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 6)
NEVER = torch.rand(5, 7) > 0.3
NEVER[2] = False  # this query sees nothing
MASKS = [None, NEVER, torch.randn(2, 4, 5, 7), torch.randn(2, 1, 1, 7), torch.zeros(5, 7).masked_fill(~NEVER, float("-inf"))]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_masks(mask, dtype):
    mask = mask.to(dtype) if mask is not None and mask.dtype != torch.bool else mask
    args = Q.to(dtype), K.to(dtype), V.to(dtype), mask
    low = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    check(SDPA, *args, **low)
    check(SDPA, *args, scale=0.3, **low, jit=False)


@together
def test_shapes_and_causal():
    check(SDPA, Q, K, V, None, 0.0, True)
    check(SDPA, Q, K[:, :, :3], V[:, :, :3], None, 0.0, True)
    check(SDPA, Q[0], K[0], V[0], None, 0.0, True)
    check(SDPA, Q[0], K[0], V[0], torch.randn(4, 5, 7))
    check(SDPA, Q[None], K[None], V[None], torch.randn(2, 1, 5, 7))
    check(SDPA, Q[:, :, :0], K, V)
    check(SDPA, Q, K[:, :2], V[:, :2], NEVER, enable_gqa=True)
    check(SDPA, Q, K[:, :1], V[:, :1], None, 0.0, True, enable_gqa=True)


@pytest.mark.parametrize("mask", MASKS)
@together
def test_gradients(mask):
    check_gradients(SDPA, Q, K, V, mask)


@together
def test_gradients_of_shared_heads():
    check_gradients(SDPA, Q, K[:, :2], V[:, :2], None, 0.0, True, enable_gqa=True)


def fused(q, k, v, bias, dropout_p, is_causal, grad, key, scale=None):
    """The fused forward op and its backward op, as the recorder calls them."""

    def run(q, k, v, bias, grad, key):
        out, lse, *_, seed, offset, _ = FUSED.fn(q, k, v, bias, dropout_p, is_causal, False, scale=scale, key=key)
        saved = out, lse, None, None, q.shape[-2], k.shape[-2]
        return out, lse, seed, BACK.fn(grad, q, k, v, bias, [True] * 4, *saved, dropout_p, is_causal, seed, offset, scale=scale)

    with _compat.enable_x64():
        out, lse, seed, grads = jax.jit(run)(*(to_jax(t) for t in (q, k, v, bias, grad)), key)
        return to_torch(out), to_torch(lse), to_torch(seed), [None if g is None else to_torch(g) for g in grads]


FUSED_CASES = [(None, True), (None, False), (torch.randn(2, 4, 5, 7), False), (torch.randn(2, 1, 5, 7), False), (NEVER, False)]


@pytest.mark.parametrize(("bias", "is_causal"), FUSED_CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_pair(bias, is_causal, dtype):
    floating = bias is not None and bias.dtype != torch.bool
    leaves = [t.clone().requires_grad_() for t in ((Q, K, V, bias) if floating else (Q, K, V))]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves[:3], leaves[3] if floating else bias, 0.0, is_causal, scale=0.4)
    g = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, g)
    low = [None if t is None or t.dtype == torch.bool else t.to(dtype) for t in (Q, K, V, bias, g)]
    low[3] = low[3] if floating else bias
    got, lse, _, grads = fused(*low[:4], 0.0, is_causal, low[4], jax.random.key(0), scale=0.4)
    close = {"rtol": 5e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(got.float(), out.detach(), **close)
    for a, e in zip(grads, expected, strict=False):
        torch.testing.assert_close(a.float(), e, **close)
        assert a.dtype == dtype
    assert (grads[3] is None) == (bias is None)
    scores = Q @ K.mT * 0.4
    if bias is None and not is_causal:
        torch.testing.assert_close(lse, scores.logsumexp(-1), **close)


def test_structure_follows_torchs_meta_kernel():
    meta = [t.to("meta") for t in (Q, K, V)]
    expected = aten._scaled_dot_product_fused_attention_overrideable(*meta)
    with _compat.enable_x64():
        got = FUSED.fn(*(to_jax(t) for t in (Q, K, V)), key=jax.random.key(0))
    assert len(got) == len(expected)
    for g, e in zip(got, expected, strict=True):
        if isinstance(e, torch.Tensor):
            assert (to_torch(g).shape, to_torch(g).dtype) == (e.shape, e.dtype)
        else:
            assert g == e


def test_backward_uses_the_mask_of_the_forward():
    """With one-hot values the output is the dropped-out probability matrix itself, so the mask can be read off."""
    q, k, v = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4), torch.eye(6).expand(1, 2, 6, 6).contiguous()
    p = torch.softmax(q @ k.mT / 2, -1)
    g = torch.randn(1, 2, 6, 6)
    out, _, seed, grads = fused(q, k, v, None, 0.4, False, g, jax.random.key(3))
    keep = out != 0
    assert 0 < keep.sum() < keep.numel()
    torch.testing.assert_close(out, torch.where(keep, p / 0.6, 0.0))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    again = (torch.softmax(leaves[0] @ leaves[1].mT / 2, -1) * keep / 0.6) @ leaves[2]
    for a, e in zip(grads, torch.autograd.grad(again, leaves, g), strict=False):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)
    other = fused(q, k, v, None, 0.4, False, g, jax.random.key(4))
    assert other[2] != seed and not torch.equal(other[0], out)
    torch.testing.assert_close(fused(q, k, v, None, 1.0, False, g, jax.random.key(4))[0], torch.zeros_like(out))


def test_dropout_keeps_the_right_share():
    ones = jnp.zeros((1, 1, 300, 8)), jnp.zeros((1, 1, 300, 8)), jnp.ones((1, 1, 300, 1))
    out, _ = attention(*ones, dropout_p=0.25, key=jax.random.key(0))
    assert abs(float(out.mean()) - 1) < 0.01


def test_dropout_needs_a_key():
    with pytest.raises(ValueError, match=r"dropout_p=0.5 needs a PRNG key"):
        attention(jnp.ones((1, 1, 2, 2)), jnp.ones((1, 1, 2, 2)), jnp.ones((1, 1, 2, 2)), dropout_p=0.5)
