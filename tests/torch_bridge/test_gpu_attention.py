"""When attention goes to cuDNN, and what a program for CUDA then holds. No GPU is needed: programs are lowered for a platform that is not there, and
a stand-in that follows cuDNN's formulas shows that its results are put together right."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import Mesh, PartitionSpec

from torch_bridge import _compat
from torch_bridge.collectives import attention_ops
from torch_bridge.lowerings import lookup
from torch_bridge.lowerings.attention import attention
from torch_bridge.lowerings.kernels import cudnn_attention, flash_attention
from torch_bridge.precision import precision_mode

aten = torch.ops.aten
FUSED = lookup(aten._scaled_dot_product_fused_attention_overrideable.default).fn
BACK = lookup(aten._scaled_dot_product_fused_attention_overrideable_backward.default).fn
WHOLE = lookup(aten.scaled_dot_product_attention.default).fn
FLASH = lookup(attention_ops.ops.flash_attention.default).fn
FLASH_BACK = lookup(attention_ops.ops.flash_attention_backward.default).fn
B, H, K, S, D = 2, 4, 2, 96, 64
SCORES = f"{S}x{S}x"
FORWARD, BACKWARD = "__cudnn$fmhaSoftmax(", "__cudnn$fmhaSoftmaxBackward("


def arrays(*shape: int, count: int = 3, dtype=jnp.bfloat16) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(sum(shape)), count)
    return [jax.random.normal(key, shape, dtype) for key in keys]


def qkv(dtype=jnp.bfloat16) -> list[jax.Array]:
    return [*arrays(B, H, S, D, count=1, dtype=dtype), *arrays(B, K, S, D, count=2, dtype=dtype)]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that looks as if it had an H100 and cuDNN 9.10, until something is to run."""
    monkeypatch.setattr(cudnn_attention, "_on_cuda", lambda: True)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda wanted: tuple(map(int, wanted.split("."))) <= (9, 0))
    cudnn_attention._tell.cache_clear()


def lowered(fn, *args, platform: str = "cuda") -> str:
    with _compat.enable_x64():
        return jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()


# -- when -------------------------------------------------------------------------------------------


def test_a_machine_without_cuda_devices_never_asks_cudnn(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert cudnn_attention.refusal(*qkv()) == "no CUDA device"


def spec(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def of(q=(B, H, S, D), k=(B, K, S, D), v=None, mask=None, dtype=jnp.bfloat16, **options):
    return cudnn_attention.refusal(spec(*q, dtype=dtype), spec(*k, dtype=dtype), spec(*(v or k), dtype=dtype), mask, **options)


def test_what_cudnn_computes(hopper):
    assert of() is None
    assert of(is_causal=True) is None
    assert of(dtype=jnp.float16, is_causal=True) is None
    assert of((B, H, S, 256), (B, H, S, 256)) is None
    assert of(mask=spec(B, 1, 1, S, dtype=jnp.bool_)) is None
    assert of(k=(B, K, 2 * S, D)) is None


REFUSED = [
    (dict(dtype=jnp.float32), "bfloat16 or float16, not float32"),
    (dict(q=(H, S, D), k=(H, S, D)), "[batch, heads, length, head_dim], not 3 dims"),
    (dict(v=(B, K, S, 32)), "keys and values of one shape, not [2, 2, 96, 64] and [2, 2, 96, 32]"),
    (dict(k=(1, K, S, D)), "no broadcasting of q [2, 4, 96, 64] against k [1, 2, 96, 64]"),
    (dict(k=(B, 3, S, D)), "no broadcasting"),
    (dict(q=(B, H, 1, D)), "nothing is gained for 1 queries and 96 keys"),
    (dict(q=(0, H, S, D), k=(0, K, S, D)), "nothing is gained"),
    (dict(dropout_p=0.1), "dropout mask would be the same in every step"),
    (dict(is_causal=True, k=(B, K, 2 * S, D)), "is_causal with 96 queries and 192 keys"),
    (dict(is_causal=True, mask=spec(S, S, dtype=jnp.bool_)), "is_causal with a mask"),
    (dict(mask=spec(S, S)), "boolean masks only, not bfloat16"),
    (dict(q=(B, H, 95, D), mask=spec(95, S, dtype=jnp.bool_)), "even lengths, not 95 queries and 96 keys"),
    (dict(q=(B, H, S, 264), k=(B, K, S, 264)), "NotImplementedError: The head dim must be <= 256 and a multiple of 8, but got 264"),
    (dict(q=(B, H, S, 60), k=(B, K, S, 60)), "multiple of 8, but got 60"),
]


@pytest.mark.parametrize(("case", "reason"), REFUSED)
def test_what_it_does_not(hopper, case, reason):
    assert reason in of(**case)


def test_mixed_dtypes_are_refused(hopper):
    assert cudnn_attention.refusal(spec(B, H, S, D), spec(B, H, S, D, dtype=jnp.float16), spec(B, H, S, D)) == "q, k and v differ in dtype"


@pytest.mark.parametrize(("name", "value"), [("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1"), ("NEURON_CC_FLAGS", "--auto-cast=matmult")])
def test_other_roundings_stay_with_xla(hopper, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert "the environment asks for other roundings (Mode(" in of(mode=precision_mode.current())


def test_older_machines(hopper, monkeypatch):
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda wanted: wanted == "7.5")
    assert of() == "it needs compute capability 8.0"
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda wanted: wanted == "8.0")
    assert of() is None
    assert "must be <= 128" in of((B, H, S, 256), (B, H, S, 256))


def test_no_cudnn_or_another_jax(monkeypatch):
    monkeypatch.setattr(cudnn_attention, "_on_cuda", lambda: True)
    monkeypatch.setattr(cudnn, "cuda_versions", None)
    assert of() == "RuntimeError: cuDNN is not detected."
    monkeypatch.setattr(cudnn_attention, "_cudnn", lambda: SimpleNamespace())
    assert "AttributeError" in of()


def test_each_reason_is_logged_once(hopper, caplog):
    with caplog.at_level(logging.INFO, "nxd_jax"):
        for _ in range(2):
            of(dropout_p=0.1)
            of(dtype=jnp.float32)
            of()
    assert len(caplog.messages) == 2
    assert "computed by XLA" in caplog.messages[0] and "the same in every step" in caplog.messages[0]


# -- what a program for CUDA holds ------------------------------------------------------------------


def pair(q, k, v, grad, mask=None, is_causal=True):
    """The recorded forward and backward ops."""
    out, lse, _, _, s, t, seed, offset, _ = FUSED(q, k, v, mask, 0.0, is_causal, key=None)
    grads = BACK(grad, q, k, v, mask, [True] * 3 + [False], out, lse, None, None, s, t, 0.0, is_causal, seed, offset)
    return out, lse, grads[:3]


def test_recorded_ops_become_one_cudnn_call_each(hopper):
    args = *qkv(), *arrays(B, H, S, D, count=1)
    text = lowered(pair, *args)
    assert text.count(FORWARD) == text.count(BACKWARD) == 1
    assert text.count("stablehlo.custom_call") == 2
    assert SCORES not in text  # nothing of queries times keys
    assert f"tensor<{B}x{S}x{K}x{D}xbf16>" in text  # shared key heads are not repeated
    assert text.count("CAUSAL") == 2


def test_a_program_for_cpus_has_none_on_the_same_machine(hopper):
    args = *qkv(), *arrays(B, H, S, D, count=1)
    text = lowered(pair, *args, platform="cpu")
    assert "cudnn" not in text and SCORES in text


def test_float32_stays_with_xla(hopper):
    args = *qkv(jnp.float32), *arrays(B, H, S, D, count=1, dtype=jnp.float32)
    assert "cudnn" not in lowered(pair, *args)


@pytest.mark.parametrize("shape", [(S, S), (B, 1, 1, S), (B, H, S, S)])
def test_boolean_masks(hopper, shape):
    args = *qkv(), *arrays(B, H, S, D, count=1), jnp.ones(shape, bool)
    text = lowered(lambda *a: pair(*a, is_causal=False), *args)
    assert text.count("__cudnn$fmhaScaleBiasSoftmax(") == text.count("__cudnn$fmhaScaleBiasSoftmaxBackward(") == 1


def test_flash_attention_op(hopper):
    q, k, v, grad = arrays(B, H, S, D, count=4)

    def both(q, k, v, grad):
        out, lse, seed = FLASH(q, k, v, None, 0.0, True, 0.1)
        return FLASH_BACK(grad, q, k, v, out, lse, seed, 0.0, True, 0.1)

    text = lowered(both, q, k, v, grad)
    assert text.count(FORWARD) == text.count(BACKWARD) == 1
    assert "cudnn" not in lowered(lambda q, k, v: FLASH(q, k, v, None, 0.5, True, 0.1, key=jax.random.key(0)), q, k, v)


def of_whole(q, k, v):
    return WHOLE(q, k, v, None, 0.0, True, enable_gqa=True).astype(jnp.float32).sum()


def of_flash(q, k, v):
    return flash_attention.flash_attention(q, k, v, jnp.zeros((), jnp.int64), flash_attention.Options(0.1))[0].astype(jnp.float32).sum()


@pytest.mark.parametrize("fn", [of_whole, of_flash])
def test_gradients_by_jax(hopper, fn):
    """Modules that left for JAX whole are differentiated there."""
    args = qkv() if fn is of_whole else arrays(B, H, S, D)
    text = lowered(jax.grad(fn, (0, 1, 2)), *args)
    assert text.count(FORWARD) == text.count(BACKWARD) == 1
    assert "cudnn" not in lowered(jax.grad(fn, (0, 1, 2)), *args, platform="cpu")


def test_in_a_shard_map(hopper):
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    heads = PartitionSpec(None, "tp")
    mapped = jax.shard_map(pair, mesh=mesh, in_specs=(heads,) * 4, out_specs=heads, check_vma=False)
    text = lowered(mapped, *qkv(), *arrays(B, H, S, D, count=1))
    assert text.count(FORWARD) == text.count(BACKWARD) == 1


# -- numbers, with a stand-in for cuDNN -----------------------------------------------------------------


class StandIn:
    """cuDNN's formulas: masks are added as large negative numbers, and the backward pass takes the logsumexp and the output it is given."""

    MaskType, AttentionLayout = cudnn.MaskType, cudnn.AttentionLayout
    combine_bias_and_mask = staticmethod(cudnn.combine_bias_and_mask)

    def __init__(self) -> None:
        self._dot_product_attention_bwd_p_wrapper = SimpleNamespace(bind=self.backward)

    def scores(self, q_BSHD, k_BTKD, bias, scale, mask_type):
        k = jnp.repeat(k_BTKD, q_BSHD.shape[2] // k_BTKD.shape[2], 2).astype(jnp.float32)
        s = jnp.einsum("bshd,bthd->bhst", q_BSHD.astype(jnp.float32), k) * scale
        s = s if bias is None else s + bias.astype(jnp.float32)
        return jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf) if mask_type == cudnn.MaskType.CAUSAL else s

    def dot_product_attention(self, q, k, v, *, mask, scale, mask_type, return_residual):
        assert return_residual
        s = self.scores(q, k, None if mask is None else self.combine_bias_and_mask(None, mask, q.dtype), scale, mask_type)
        v = jnp.repeat(v, q.shape[2] // v.shape[2], 2).astype(jnp.float32)
        return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(s, -1), v).astype(q.dtype), jax.nn.logsumexp(s, -1)

    def backward(self, q, k, v, bias, *rest, scale, mask_type, variadic_args, layout, **constants):
        lse, out, grad = (x.astype(jnp.float32) for x in rest[-3:])
        assert len(rest) == 9 and layout == cudnn.AttentionLayout.BTNH.value
        assert constants == {"seed": 0, "dropout_rate": 0.0, "sliding_window_length": None}
        group = q.shape[2] // k.shape[2]
        k_all, v_all = (jnp.repeat(x, group, 2).astype(jnp.float32) for x in (k, v))
        p = jnp.exp(self.scores(q, k, bias if variadic_args[0] else None, scale, mask_type) - lse[..., None])
        dp = jnp.einsum("bshd,bthd->bhst", grad, v_all)
        ds = p * (dp - jnp.einsum("bshd,bshd->bhs", grad, out)[..., None]) * scale
        dk = jnp.einsum("bhst,bshd->bthd", ds, q.astype(jnp.float32))
        dv = jnp.einsum("bhst,bshd->bthd", p, grad)
        shared = [x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3).astype(k.dtype) for x in (dk, dv)]
        return [jnp.einsum("bhst,bthd->bshd", ds, k_all).astype(q.dtype), *shared]


BLIND = np.random.default_rng(0).random((B, 1, 24, 24)) > 0.4
BLIND[0, 0, 5] = False  # this query sees nothing


@pytest.mark.core(keep=2)
@pytest.mark.parametrize(
    ("mask", "is_causal"), [(None, True), (None, False), (BLIND, False), (BLIND[0, 0], False), (BLIND[:, :, :1], False)]
)
def test_results_are_those_of_the_plain_formula(monkeypatch, mask, is_causal):
    stand_in = StandIn()
    monkeypatch.setattr(cudnn_attention, "_cudnn", lambda: stand_in)
    q, grad = arrays(B, H, 24, 8, count=2, dtype=jnp.float16)
    k, v = arrays(B, K, 24, 8, count=2, dtype=jnp.float16)
    blind, mask = mask is BLIND, None if mask is None else jnp.asarray(mask)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    (expected, expected_lse), pull = jax.vjp(lambda *a: attention(*a, mask, 0.0, is_causal, 0.3), *wide)
    out, lse = cudnn_attention.forward(q, k, v, mask, is_causal, 0.3)
    np.testing.assert_allclose(out, expected, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-3, atol=1e-3)
    assert lse.dtype == jnp.float32 and out.dtype == q.dtype
    found = cudnn_attention.backward(grad, q, k, v, mask, out, lse, is_causal, 0.3)
    for a, e in zip(found, pull((grad.astype(jnp.float32), jnp.zeros_like(lse))), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-2, atol=1e-2)
    if blind:
        assert not np.asarray(out)[0, :, 5].any() and np.isneginf(lse[0, :, 5]).all() and not np.asarray(found[0])[0, :, 5].any()


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
def test_on_a_gpu(masked):
    if not cudnn_attention._on_cuda():
        pytest.skip("needs a CUDA device that JAX sees")
    args = *qkv(), *arrays(B, H, S, D, count=1), jnp.asarray(np.random.default_rng(0).random((B, 1, S, S)) > 0.3) if masked else None
    assert cudnn_attention.refusal(*args[:3], args[4], is_causal=not masked) is None
    with _compat.enable_x64():
        out, lse, grads = jax.jit(lambda *a: pair(*a, is_causal=not masked))(*args)
        wide = [x.astype(jnp.float32) for x in args[:4]]
        expected, expected_lse, expected_grads = jax.jit(lambda *a: pair(*a, is_causal=not masked))(*wide, args[4])
    for a, e in zip((out, lse, *grads), (expected, expected_lse, *expected_grads), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), e, rtol=3e-2, atol=3e-2)
