"""Flash attention against torch's plain attention: values, gradients, dropout, memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import torch_bridge
from nxd_jax.kernels.flash_attn import nki_flash_attn_func
from tests.nxd_jax.conftest import Nxd
from torch_bridge import _compat
from torch_bridge.lowerings.kernels import flash_attention
from torch_bridge.recorder import sharded

Tensors = list[torch.Tensor]


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> Tensors:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]


def on_xla(tensors: Tensors) -> Tensors:
    return [t.detach().to("xla").requires_grad_() for t in tensors]


def with_gradients(out: torch.Tensor, inputs: Tensors, grad: torch.Tensor) -> Tensors:
    return [out.detach().cpu(), *(g.cpu() for g in torch.autograd.grad(out, inputs, grad.to(out.device)))]


@pytest.mark.core(keep=2)
@pytest.mark.parametrize("length", [1, 5, 256, 257, 600])
@pytest.mark.parametrize("causal", [True, False])
def test_parity(length: int, causal: bool) -> None:
    qkv = inputs(2, 3, length, 8)
    grad = torch.randn(2, 3, length, 8)
    expected = with_gradients(F.scaled_dot_product_attention(*qkv, is_causal=causal), qkv, grad)
    mine = on_xla(qkv)
    found = with_gradients(nki_flash_attn_func(*mine, causal=causal, transpose_nki_inputs=False), mine, grad)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_transposed_inputs_and_scale() -> None:
    """The default layout is [batch, heads, head_dim, length] in, [batch, heads, length, head_dim] out."""
    qkv = inputs(2, 3, 8, 300)
    grad = torch.randn(2, 3, 300, 8)
    expected = with_gradients(F.scaled_dot_product_attention(*(t.mT for t in qkv), is_causal=True, scale=0.3), qkv, grad)
    mine = on_xla(qkv)
    found = with_gradients(nki_flash_attn_func(*mine, 1, 0.0, 0.3), mine, grad)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    host = nki_flash_attn_func(*qkv, softmax_scale=0.3)
    torch.testing.assert_close(host.detach(), expected[0])


@pytest.mark.parametrize(("S", "T", "causal"), [(300, 520, False), (520, 300, False), (300, 520, True), (520, 300, True)])
def test_keys_of_another_length(S: int, T: int, causal: bool) -> None:
    q, k, v = torch.randn(1, 2, S, 8, requires_grad=True), *(torch.randn(1, 2, T, 8, requires_grad=True) for _ in range(2))
    grad = torch.randn(1, 2, S, 8)
    expected = with_gradients(F.scaled_dot_product_attention(q, k, v, is_causal=causal), [q, k, v], grad)
    mine = on_xla([q, k, v])
    found = with_gradients(nki_flash_attn_func(*mine, causal=causal, transpose_nki_inputs=False), mine, grad)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_bfloat16() -> None:
    qkv = inputs(1, 2, 400, 16, dtype=torch.bfloat16)
    grad = torch.randn(1, 2, 400, 16, dtype=torch.bfloat16)
    wide = [t.detach().float().requires_grad_() for t in qkv]
    exact = with_gradients(F.scaled_dot_product_attention(*wide, is_causal=True), wide, grad.float())
    mine = on_xla(qkv)
    found = with_gradients(nki_flash_attn_func(*mine, transpose_nki_inputs=False), mine, grad)
    assert all(t.dtype == torch.bfloat16 for t in found)
    torch.testing.assert_close([t.float() for t in found], exact, rtol=3e-2, atol=3e-2)


def test_double() -> None:
    qkv = inputs(1, 2, 300, 8, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(*qkv, is_causal=True).detach()
    found = nki_flash_attn_func(*on_xla(qkv), transpose_nki_inputs=False)
    torch.testing.assert_close(found.detach().cpu(), expected, rtol=1e-12, atol=1e-12)


# -- dropout ------------------------------------------------------------------------------------------


def weights(length: int, p: float, seed: int | None = None) -> torch.Tensor:
    """The attention weights after dropout: attention over the identity matrix."""
    q = torch.randn(1, 1, length, length, device="xla")
    v = torch.eye(length, device="xla")[None, None]
    return nki_flash_attn_func(q, torch.zeros_like(q), v, dropout_p=p, causal=False, seed=seed, transpose_nki_inputs=False)


@pytest.mark.parametrize("length", [200, 600])
def test_dropout_drops_the_right_share(length: int) -> None:
    found = weights(length, 0.25) * length
    values = found.cpu()
    kept = values != 0
    torch.testing.assert_close(values[kept], torch.full_like(values[kept], 4 / 3), rtol=1e-3, atol=0)
    assert abs(kept.float().mean() - 0.75) < 5 * (0.25 * 0.75 / values.numel()) ** 0.5
    assert abs(kept[0, 0, :150, :150].float().mean() - kept[0, 0, -150:, -150:].float().mean()) < 0.03


def test_dropout_draws_anew_unless_seeded() -> None:
    assert not torch.equal(weights(20, 0.5).cpu(), weights(20, 0.5).cpu())
    assert torch.equal(weights(20, 0.5, seed=3).cpu() != 0, weights(20, 0.5, seed=3).cpu() != 0)
    assert not torch.equal(weights(20, 0.5, seed=3).cpu() != 0, weights(20, 0.5, seed=4).cpu() != 0)


@pytest.mark.parametrize("length", [100, 300])
def test_dropout_gradients_use_the_same_mask(length: int) -> None:
    """The output is linear in v, and its gradient that of the plain formula with the mask that the forward drew."""
    q, k, v = inputs(1, 1, length, 8)
    eye = torch.eye(length)[None, None]
    mine = on_xla([q, k, v])
    dropped = nki_flash_attn_func(mine[0], mine[1], eye.to("xla"), dropout_p=0.3, seed=5, transpose_nki_inputs=False).detach().cpu()
    mask = (dropped != 0).float() / 0.7
    plain = torch.softmax((q @ k.mT * 8**-0.5).masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf), -1)
    grad = torch.randn(1, 1, length, 8)
    expected = with_gradients((plain * mask) @ v, [q, k, v], grad)
    found = with_gradients(nki_flash_attn_func(*mine, dropout_p=0.3, seed=torch.tensor([5]), transpose_nki_inputs=False), mine, grad)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("independent", ["0", "1"])
def test_dropout_masks_of_ranks(nxd: Nxd, monkeypatch: pytest.MonkeyPatch, independent: str) -> None:
    """Ranks that share q, k and v draw one mask; data-parallel ranks the same one, or their own where that is asked for."""
    monkeypatch.setenv("NXD_JAX_INDEPENDENT_DRAWS", independent)
    nxd(4, tp=2)
    one = torch.ones(1, 1, 6, 6)
    q = sharded.from_ranks(lambda r: one.clone(), ["dp"])
    out = nki_flash_attn_func(q, q, torch.eye(6, device="xla")[None, None], dropout_p=0.5, transpose_nki_inputs=False)
    a, b, c, d = sharded.shards(out)
    assert torch.equal(a, b) and torch.equal(c, d) and torch.equal(a, c) == (independent == "0")


def test_checkpointing_draws_the_same_mask() -> None:
    from torch.utils.checkpoint import checkpoint

    q, k, v = on_xla(inputs(1, 1, 20, 8))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nki_flash_attn_func(q, k, v, dropout_p=0.5, transpose_nki_inputs=False)

    out = checkpoint(attend, q, k, v, use_reentrant=False)
    (grad,) = torch.autograd.grad(out.sum(), v)  # of a sum: column sums of the dropped weights
    torch.testing.assert_close((grad[..., 0] * v[..., 0].detach()).sum().cpu(), out[..., 0].sum().detach().cpu(), rtol=1e-4, atol=1e-5)


# -- errors, memory, JAX ------------------------------------------------------------------------------


def test_errors() -> None:
    q = torch.randn(1, 4, 8, 16, device="xla")
    k = torch.randn(1, 2, 8, 16, device="xla")
    with pytest.raises(ValueError, match=r"q torch.float32\[1, 4, 8, 16\], k torch.float32\[1, 2, 8, 16\].*repeat the K/V heads"):
        nki_flash_attn_func(q, k, k, transpose_nki_inputs=False)
    with pytest.raises(ValueError, match="of one dtype"):
        nki_flash_attn_func(q, q, q.bfloat16())
    with pytest.raises(ValueError, match="dropout_p must be a probability, got 1.5"):
        nki_flash_attn_func(q, q, q, dropout_p=1.5)
    with pytest.raises(
        ValueError, match=r"got q of shape \[1, 4, 200, 16\]: a head_dim of 200 and a length of 16.*pass transpose_nki_inputs=False"
    ):
        nki_flash_attn_func(*inputs(1, 4, 200, 16))
    with pytest.raises(AssertionError, match="lnc=2 on trn1"):
        nki_flash_attn_func(q, q, q, lnc=2, hardware_type="trn1")
    nki_flash_attn_func(q, q, q, lnc=2, hardware_type="trn2")


def test_memory_is_linear_in_the_length() -> None:
    """At 8192 one matrix of scores has 256 MiB; forward and backward together need less than 8 MiB beside their arguments and results."""
    S, D = 8192, 64

    def run(q: jax.Array, k: jax.Array, v: jax.Array, grad: jax.Array) -> object:
        out, vjp = jax.vjp(lambda *x: flash_attention.flash_attention(*x, jnp.int64(0), flash_attention.Options(D**-0.5))[0], q, k, v)
        return out, vjp(grad)

    with _compat.enable_x64():
        one = jax.ShapeDtypeStruct((1, 1, S, D), jnp.float32)
        memory = jax.jit(run).lower(one, one, one, one).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 8 * 2**20 < S * S * 4 / 30


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return nki_flash_attn_func(q, k, v, transpose_nki_inputs=False)


def test_captured_and_as_jax_functions() -> None:
    """The op runs in eager torch, and in JAX, with its gradients."""
    module, x = Module(), torch.randn(2, 300, 8)
    expected = module(x)
    expected.square().sum().backward()
    weight = module.qkv.weight
    assert weight.grad is not None
    wanted = weight.grad.clone()
    module.zero_grad()
    graph = torch_bridge.capture(module, x)
    assert any("flash_attention" in str(n.target) for n in graph.graph.nodes)
    out = graph(module.qkv.weight, module.qkv.bias, x)
    out = out[0] if isinstance(out, tuple) else out
    out.square().sum().backward()
    torch.testing.assert_close([out, weight.grad], [expected, wanted], rtol=1e-4, atol=1e-5)
    function = torch_bridge.to_jax(module)
    params = {n: jnp.asarray(p.detach().numpy()) for n, p in module.named_parameters()}
    grads = jax.grad(lambda p: jnp.square(function(p, {}, None, jnp.asarray(x.numpy()))[0]).sum())(params)
    torch.testing.assert_close(torch.from_numpy(np.array(grads["qkv.weight"])), wanted, rtol=1e-4, atol=1e-4)


def test_jax_differentiates_it() -> None:
    q, k, v = (jax.random.normal(key, (1, 2, 300, 8)) for key in jax.random.split(jax.random.key(0), 3))

    def flash(*x: jax.Array) -> jax.Array:
        return flash_attention.flash_attention(*x, jnp.zeros((), int), flash_attention.Options(8**-0.5))[0].sum()

    def plain(*x: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(*(t.swapaxes(1, 2) for t in x), is_causal=True).sum()

    for found, expected in zip(jax.grad(flash, (0, 1, 2))(q, k, v), jax.grad(plain, (0, 1, 2))(q, k, v), strict=True):
        assert jnp.allclose(found, expected, rtol=1e-4, atol=1e-5)
