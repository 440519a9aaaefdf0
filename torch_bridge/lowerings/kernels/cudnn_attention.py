"""Attention by cuDNN on CUDA devices: when, and how its kernels are called in both directions.

Which code a program gets is decided twice. `refusal` says, when the program is traced, whether cuDNN could compute this attention on this machine;
`forward_or` and `backward_or` then leave the last word to the platform that the program is lowered for (`lax.platform_dependent`), because a
machine with GPUs also runs programs on virtual CPU devices, where a world is larger than its GPUs.

Chosen are bfloat16 and float16 with no mask, with `is_causal` and equal lengths, or with a boolean mask. Masks of numbers stay with XLA: what cuDNN
makes of -inf and of numbers near the smallest is not what torch makes of them. So does dropout, whose mask cuDNN draws from a constant of the
program; and everything where the environment asks for other roundings (`precision_mode`).

Legend: B batch, H query heads, K key heads (H = K * G), S queries, T keys, D head dim. All arrays are torch's [B, H, S, D]; cuDNN takes [B, S, H, D], which
is how most models lay them out in memory, so that XLA need not move anything.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torch_bridge.lowerings._opmath import HALF
from torch_bridge.precision.precision_mode import PLAIN, Mode

logger = logging.getLogger("nxd_jax")
Gradients = tuple[jax.Array, jax.Array, jax.Array]
OLDEST = "8.0"
"""The compute capability (Ampere) from which on cuDNN has fused attention."""


# -- when -------------------------------------------------------------------------------------------


def refusal(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    mode: Mode = PLAIN,
) -> str | None:
    """Why XLA computes this attention even on CUDA devices; None if cuDNN does.

    q [B, H, S, D], k and v [B, K, T, D], mask broadcasting to [B, H, S, T]: only shapes and dtypes are looked at. mode: the precision of the program.
    On a machine with CUDA devices each reason is logged once (logger "nxd_jax", INFO).
    """
    if not _on_cuda():
        return "no CUDA device"
    reason = _unlike_torch(q, k, v, mask, dropout_p, is_causal) or _rounded(mode) or _beyond_cudnn(q, k, v, mask)
    if reason:
        _tell(reason)
    return reason


def _on_cuda() -> bool:
    """Whether programs of this process may run on CUDA devices. Starts JAX, unless this is an abstract run."""
    from torch_bridge.mesh import abstract_arrays

    return not abstract_arrays.active() and jax.default_backend() == "gpu" and "cuda" in jax.devices()[0].client.platform_version.lower()


@functools.cache
def _tell(reason: str) -> None:
    logger.info(
        "attention is computed by XLA, with a matrix of queries times keys or block by block, and not by cuDNN's fused kernel: %s", reason
    )


def _unlike_torch(q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool) -> str | None:
    """What cuDNN would compute differently from torch, or not at all, whatever the machine."""
    if not q.dtype == k.dtype == v.dtype or q.dtype not in HALF:
        return f"it takes bfloat16 or float16, not {q.dtype.name}" if q.dtype == k.dtype == v.dtype else "q, k and v differ in dtype"
    if not q.ndim == k.ndim == v.ndim == 4:
        return f"it takes [batch, heads, length, head_dim], not {q.ndim} dims"
    if k.shape != v.shape:
        return f"it takes keys and values of one shape, not {list(k.shape)} and {list(v.shape)}"
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        return f"it has no broadcasting of q {list(q.shape)} against k {list(k.shape)}"
    S, T = q.shape[2], k.shape[2]
    if 0 in q.shape or min(S, T) < 2:
        return f"nothing is gained for {S} queries and {T} keys"
    if dropout_p:
        return "its dropout mask would be the same in every step"
    if is_causal and (mask is not None or S != T):
        return f"is_causal with {'a mask' if mask is not None else f'{S} queries and {T} keys'}"
    return None if mask is None else _unlike_torch_mask(mask, S, T)


def _unlike_torch_mask(mask: Any, S: int, T: int) -> str | None:
    if mask.dtype != jnp.bool_:
        return f"it is given boolean masks only, not {mask.dtype.name}"
    return f"masked, it takes even lengths, not {S} queries and {T} keys" if S % 2 or T % 2 else None


def _rounded(mode: Mode) -> str | None:
    """Roundings that the environment asks for: `rewrite_roundings` makes them in XLA's programs only, and a rounded logsumexp would spoil the backward pass."""
    return None if mode == PLAIN else f"the environment asks for other roundings ({mode}), which it has not"


def _beyond_cudnn(q: Any, k: Any, v: Any, mask: Any) -> str | None:
    """What this machine's cuDNN has no kernel for, by JAX's own rules (head dim, compute capability, version)."""
    try:
        cudnn = _cudnn()
        version = cudnn.check_cudnn_version()
        q, k, v = (jax.ShapeDtypeStruct((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype) for x in (q, k, v))
        cudnn.check_is_flash_attention(q, k, v, cudnn.AttentionLayout.BTNH.value, version, mask is not None, True)
        return None if cudnn.check_compute_capability(OLDEST) else f"it needs compute capability {OLDEST}"
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:  # NotImplementedError among them: it is a RuntimeError
        return f"{type(error).__name__}: {error}"


def _cudnn() -> Any:
    """JAX's cuDNN attention. Its public face, `jax.nn.dot_product_attention`, rounds the logsumexp to the dtype of q and has no way to give it back."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    return cudnn


# -- the two directions -------------------------------------------------------------------------------


def forward(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, is_causal: bool, scale: float) -> tuple[jax.Array, jax.Array]:
    """Output [B, H, S, D] in the dtype of q and logsumexp [B, H, S] in float32, as cuDNN calls. A query that sees no key gives zeros and -inf.

    For what `refusal` accepts. JAX differentiates it by cuDNN's backward pass.
    """
    cudnn = _cudnn()
    mask = _square(mask, q, k)
    out, logsumexp = cudnn.dot_product_attention(
        *map(_swapped, (q, k, v)), mask=mask, scale=scale, mask_type=_mask_type(is_causal), return_residual=True
    )
    seen = _seeing(mask)
    return _where(seen, _swapped(out), 0), lax.stop_gradient(_where(None if seen is None else seen[..., 0], logsumexp, -jnp.inf))


def backward(
    grad: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    out: jax.Array,
    logsumexp: jax.Array,
    is_causal: bool,
    scale: float,
) -> Gradients:
    """The gradients of q, k and v, as one cuDNN call on the results of `forward` (nothing is computed again but the scores in the kernel)."""
    cudnn = _cudnn()
    mask = _square(mask, q, k)
    seen = _seeing(mask)
    grad = _where(seen, grad.astype(q.dtype), 0)
    logsumexp = _where(None if seen is None else seen[..., 0], logsumexp, 0)  # -inf would make NaN of rows whose gradient is zero
    unused = jnp.zeros(0, q.dtype)
    bias = unused if mask is None else cudnn.combine_bias_and_mask(None, mask, q.dtype)
    found = cudnn._dot_product_attention_bwd_p_wrapper.bind(
        *map(_swapped, (q, k, v)),
        bias,
        *[unused] * 6,  # lengths, offsets and pages
        logsumexp,
        *map(_swapped, (out.astype(q.dtype), grad)),
        scale=scale,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(mask is not None, False),  # has a bias, wants its gradient
        mask_type=_mask_type(is_causal),
        layout=cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=None,
    )
    dq, dk, dv = map(_swapped, found)
    return dq, dk, dv


def _mask_type(is_causal: bool) -> Any:
    kinds = _cudnn().MaskType
    return kinds.CAUSAL if is_causal else kinds.NO_MASK


def _swapped(x: jax.Array) -> jax.Array:
    """[B, H, S, D] <-> [B, S, H, D]"""
    return x.swapaxes(1, 2)


def _square(mask: jax.Array | None, q: jax.Array, k: jax.Array) -> jax.Array | None:
    """A mask with all its queries and keys, [1 or B, 1 or H, S, T]: cuDNN broadcasts over batch and heads only."""
    if mask is None:
        return None
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    return jnp.broadcast_to(mask, (*mask.shape[:2], q.shape[2], k.shape[2]))


def _seeing(mask: jax.Array | None) -> jax.Array | None:
    """Which queries see any key, [.., .., S, 1]; None: all do. cuDNN would give the mean of the values to one that sees none."""
    return None if mask is None else jnp.any(mask, axis=-1, keepdims=True)


def _where(condition: jax.Array | None, x: jax.Array, otherwise: float) -> jax.Array:
    return x if condition is None else jnp.where(condition, x, jnp.asarray(otherwise, x.dtype))


# -- one or the other -----------------------------------------------------------------------------------


def forward_or(
    other: Callable[..., tuple[jax.Array, jax.Array]],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float = 1.0,
    mode: Mode = PLAIN,
) -> tuple[jax.Array, jax.Array]:
    """`forward` where the program is lowered for CUDA and cuDNN has it, else `other(q, k, v, mask)`, whose results have the same shapes and dtypes.

    On a machine without CUDA devices this is `other` and nothing else.
    """
    if refusal(q, k, v, mask, dropout_p, is_causal, mode):
        return other(q, k, v, mask)
    return lax.platform_dependent(q, k, v, mask, cuda=functools.partial(forward, is_causal=is_causal, scale=scale), default=other)


def backward_or(
    other: Callable[..., Gradients],
    grad: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    out: jax.Array,
    logsumexp: jax.Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float = 1.0,
    mode: Mode = PLAIN,
) -> Gradients:
    """`backward` where the program is lowered for CUDA and cuDNN has it, else `other(grad, q, k, v, mask, out, logsumexp)`."""
    arrays = (grad, q, k, v, mask, out, logsumexp)
    if refusal(q, k, v, mask, dropout_p, is_causal, mode):
        return other(*arrays)
    return lax.platform_dependent(*arrays, cuda=functools.partial(backward, is_causal=is_causal, scale=scale), default=other)
