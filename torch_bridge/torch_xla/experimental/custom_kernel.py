"""`torch_xla.experimental.custom_kernel`: flash attention, and Pallas kernels of the script's own.

The other kernels there are Pallas programs for TPUs; their names say what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from torch_bridge.runtime import backend
from torch_bridge.torch_xla._spmd_ops import XLA_LIB
from torch_bridge.torch_xla.core import xla_builder

__all__ = [
    "XLA_LIB",
    "FlashAttention",
    "SPMDFlashAttention",
    "flash_attention",
    "jax_import_guard",
    "make_kernel_from_pallas",
    "requires_jax",
]

_KERNELS = (
    "extended_scaled_dot_product_attention",
    "flash_attention_xla",
    "gmm",
    "gmm_backward",
    "multi_queries_paged_attention",
    "non_kernel_attention",
    "paged_attention",
    "quantized_matmul",
    "quantized_matmul_int8",
    "ragged_paged_attention",
    "tgmm",
    "trace_pallas",
)
_MASKED = 0.7
"""A score that a query must not see is this part of the lowest number: rows without any key give the mean of the values, not nan."""


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    q_segment_ids: torch.Tensor | None = None,
    kv_segment_ids: torch.Tensor | None = None,
    sm_scale: float = 1.0,
    *,
    ab: torch.Tensor | None = None,
    partition_spec: Any = None,
    mesh: Any = None,
) -> torch.Tensor:
    """softmax((q k^T + ab) * sm_scale) v of q [batch, heads, length, head_dim], in its dtype.

    k, v: [batch, heads, keys, head_dim]. causal: query i sees keys up to i. q_segment_ids [batch, length], kv_segment_ids [batch, keys]: a query sees keys
    with its own number. sm_scale: 1, not 1/sqrt(head_dim). ab: an additive bias, [batch, heads, length, keys]. Memory is linear in the lengths without
    segments and bias. Gradients reach q, k, v and ab. Works on CPU tensors, too.

    partition_spec: how q, k, v, the result and their gradients are divided over a mesh, after `xr.use_spmd()`: ("data", "model", None, None), or the same as
    text. mesh: an `xs.Mesh`, or the text of one (`str(mesh)`); None: the global one.

    Raises ValueError for shapes that do not fit, for one kind of segment ids alone, and for a partition_spec or mesh that does not fit.
    """
    if partition_spec is not None:
        from torch_bridge.torch_xla.experimental import _divided_attention

        divide = _divided_attention.divider(partition_spec, mesh)
        q, k, v = divide(q), divide(k), divide(v)
        out = flash_attention(q, k, v, causal, q_segment_ids, kv_segment_ids, sm_scale, ab=ab)
        return divide(out)
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise ValueError("flash_attention takes q_segment_ids and kv_segment_ids together, got one of them")
    backend.ensure()
    from torch_bridge.collectives import attention_ops

    if ab is None and q_segment_ids is None:
        return attention_ops.attend(q, k, v, causal, sm_scale)
    attention_ops.check(q, k, v, 0.0)
    _check(q, k, ab, q_segment_ids, kv_segment_ids)
    bias = torch.zeros((), dtype=q.dtype, device=q.device) if ab is None else ab.to(q.dtype) * sm_scale
    seen = _seen(q, k, causal, q_segment_ids, kv_segment_ids)
    if seen is not None:
        bias = bias + torch.where(seen, 0.0, _MASKED * torch.finfo(q.dtype).min).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=sm_scale)


class FlashAttention:
    """`custom_kernel.FlashAttention`: `flash_attention`, as torch_xla calls its autograd function. There are no objects of it."""

    @staticmethod
    def apply(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        q_segment_ids: torch.Tensor | None = None,
        kv_segment_ids: torch.Tensor | None = None,
        sm_scale: float = 1.0,
        ab: torch.Tensor | None = None,
        partition_spec: Any = None,
        mesh: Any = None,
    ) -> torch.Tensor:
        """`flash_attention` with all arguments by position."""
        return flash_attention(q, k, v, causal, q_segment_ids, kv_segment_ids, sm_scale, ab=ab, partition_spec=partition_spec, mesh=mesh)


SPMDFlashAttention = FlashAttention
"""`custom_kernel.SPMDFlashAttention`: the same here."""


def make_kernel_from_pallas(kernel: Callable[..., Any], output_shape_dtype_fn: Callable[..., Any]) -> Callable[..., Any]:
    """`custom_kernel.make_kernel_from_pallas`: a JAX function, which calls `pallas_call`, as one of xla tensors (`xla_builder.call_jax`).

    Shapes and dtypes of results are the function's own: `output_shape_dtype_fn` is accepted. `static_argnums` and `static_argnames` are accepted by what comes
    back: arguments that are no tensors are constants anyway. On CPUs JAX runs Pallas kernels with `interpret=True` alone, and says so.
    """

    def called(*args: Any, static_argnums: object = None, static_argnames: object = None, **kwargs: Any) -> Any:
        return xla_builder.call_jax(kernel, args, kwargs)

    return called


def jax_import_guard() -> None:
    """`custom_kernel.jax_import_guard`: nothing to do, everything runs on JAX."""


def requires_jax(function: Callable[..., Any]) -> Callable[..., Any]:
    """`custom_kernel.requires_jax`: the function itself."""
    return function


def _check(q: torch.Tensor, k: torch.Tensor, ab: Any, q_segment_ids: Any, kv_segment_ids: Any) -> None:
    batch, heads, length, keys = *q.shape[:3], k.shape[2]
    wanted = {
        "ab": (ab, [batch, heads, length, keys]),
        "q_segment_ids": (q_segment_ids, [batch, length]),
        "kv_segment_ids": (kv_segment_ids, [batch, keys]),
    }
    for name, (given, shape) in wanted.items():
        if given is not None and list(given.shape) != shape:
            raise ValueError(f"flash_attention wants {name} of shape {shape}, got {list(given.shape)}")


def _seen(
    q: torch.Tensor, k: torch.Tensor, causal: bool, q_segment_ids: torch.Tensor | None, kv_segment_ids: torch.Tensor | None
) -> torch.Tensor | None:
    """Which keys [.., keys] each query [.., length, 1] sees; None: all."""
    seen = None
    if q_segment_ids is not None and kv_segment_ids is not None:
        seen = q_segment_ids[:, None, :, None] == kv_segment_ids[:, None, None, :]
    if causal:
        triangle = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        seen = triangle if seen is None else seen & triangle
    return seen


def _without(name: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"torch_xla.experimental.custom_kernel.{name}: Pallas kernels for TPUs are not there. For attention call flash_attention of this module or "
            "torch.nn.functional.scaled_dot_product_attention. Write a kernel of your own in JAX, and call it with "
            "torch_xla.core.xla_builder.call_jax(function, tensors)"
        )

    kernel.__name__ = kernel.__qualname__ = name
    return kernel


def __getattr__(name: str) -> Any:
    if name in _KERNELS:
        return _without(name)
    raise AttributeError(f"module 'torch_xla.experimental.custom_kernel' has no attribute {name!r}")
