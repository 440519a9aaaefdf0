"""`torch.autocast("xla")`: which ops change the dtype of their inputs, and the kernels that do it. Imports neither JAX nor the recorder.

The op lists are those of torch_xla's autocast mode. torch consults these kernels only while autocast is on, so recording without it pays
nothing. A kernel casts and then calls its op with autocast off, above autograd: the casts have gradients and are nodes like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_bridge.device import autocast_regions
from torch_bridge.runtime import backend

LOWER = (
    "conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input",
    "mm", "bmm", "matmul", "linear", "einsum", "addmm", "addbmm", "baddbmm", "prelu", "relu", "max_pool2d",
)  # fmt: skip
"""Ops that compute in autocast's dtype. Attention is not among them: it keeps its input type."""

MIXED = ("scaled_dot_product_attention",)
"""Ops that keep their input type, and compute in autocast's dtype if their inputs differ in theirs, as the products inside would."""

FLOAT32 = (
    "batch_norm", "_softmax", "softmax.int", "softmax.Dimname", "log_softmax.int", "log_softmax.Dimname",
    "prod", "prod.dim_int", "prod.dim_Dimname", "cdist", "trace",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss", "smooth_l1_loss", "nll_loss", "nll_loss2d",
    "cross_entropy_loss", "kl_div", "ctc_loss.IntList", "ctc_loss.Tensor", "cosine_embedding_loss", "hinge_embedding_loss",
    "margin_ranking_loss", "multi_margin_loss", "multilabel_margin_loss", "multilabel_margin_loss_forward", "soft_margin_loss",
    "triplet_margin_loss",
    "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "replication_pad3d",
    "cholesky", "cholesky_inverse", "cholesky_solve", "inverse", "linalg_inv_ex", "linalg_svd", "qr", "svd", "triangular_solve",
)  # fmt: skip
"""Ops that compute in float32."""

PROMOTE = ("cat", "stack", "index_copy", "index_copy.dimname")
"""Ops whose inputs become the widest floating-point type among them."""

_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
_libraries: list[Any] = []
_cache: dict[tuple[int, bool, torch.dtype], tuple[torch.Tensor, Any, torch.Tensor]] = {}


def install() -> None:
    """Register the kernels; everything else runs in its input type."""
    fallthrough = torch.library.Library("_", "IMPL")
    fallthrough.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    kernels = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for names, target in ((LOWER, _lower_dtype), (MIXED, _lower_mixed), (FLOAT32, _float32), (PROMOTE, _widest)):
        for name in names:
            kernels.impl(name, _kernel(name, target))
    _libraries.extend((fallthrough, kernels))
    autocast_regions.install()
    _clear_at_exit()


def _kernel(name: str, target: Callable[[Any], torch.dtype | None]) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op: Any = None

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal op
        op = op or getattr(getattr(torch.ops.aten, packet), overload or "default")
        dtype = target((args, kwargs))
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            if dtype is None:
                return op(*args, **kwargs)
            return op(*_cast(args, dtype), **_cast(kwargs, dtype))

    return run


def _lower_dtype(inputs: Any) -> torch.dtype:
    return torch.get_autocast_dtype("xla")


def _lower_mixed(inputs: Any) -> torch.dtype | None:
    """Autocast's dtype for inputs of several; None if they are alike."""
    return torch.get_autocast_dtype("xla") if len({t.dtype for t in _floating(inputs)}) > 1 else None


def _float32(inputs: Any) -> torch.dtype:
    return torch.float32


def _widest(inputs: Any) -> torch.dtype | None:
    """The widest floating-point dtype among the xla tensors; None without any."""
    widest: torch.dtype | None = None
    for t in _floating(inputs):
        widest = t.dtype if widest is None else torch.promote_types(widest, t.dtype)
    return widest


def _floating(x: object) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        if x.is_floating_point() and x.device.type == "xla":
            yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from _floating(y)
    elif isinstance(x, dict):
        yield from _floating(list(x.values()))


def _cast(x: object, dtype: torch.dtype) -> Any:
    """`x` with its floating-point xla tensors in `dtype`; float64 stays, as in torch, unless it is asked for."""
    if isinstance(x, torch.Tensor):
        wrong = x.is_floating_point() and x.dtype not in (dtype, torch.float64) and x.device.type == "xla"
        return _cached_cast(x, dtype) if wrong else x
    if isinstance(x, (list, tuple)):
        return type(x)([_cast(y, dtype) for y in x])
    if isinstance(x, dict):
        return {name: _cast(y, dtype) for name, y in x.items()}
    return x


def _cached_cast(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight is cast once in an autocast region, so that all its uses share one cast and one gradient."""
    if not _is_weight(t) or dtype != torch.get_autocast_dtype("xla"):
        return t.to(dtype)
    key = (id(t), torch.is_grad_enabled(), dtype)
    found = _cache.get(key)
    if found is not None and found[1] == _value(t):
        return found[2]
    cast = t.to(dtype)
    _cache[key] = (t, _value(t), cast)
    return cast


def _is_weight(t: torch.Tensor) -> bool:
    """torch.func's wrappers are none."""
    return (
        t.requires_grad
        and t.is_leaf
        and hasattr(t, "_storage")
        and not t._is_view()
        and t.dtype == torch.float32
        and torch.is_autocast_cache_enabled()
    )


def _value(t: Any) -> tuple[Any, int]:
    """What stands for the value a tensor has now: a weight written to inside the region is cast anew."""
    from torch_bridge.recorder import dispatch, tensor

    backend.ensure()
    from torch_bridge.ir.segment import LOCK

    with LOCK:
        return dispatch.STATE.session.current, tensor.read(t)


def _clear_at_exit() -> None:
    """Drop the cached casts when torch drops its own: at the end of the outermost region."""
    clear = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        _cache.clear()
        clear()

    torch.clear_autocast_cache = clear_autocast_cache
