"""Every difference between supported torch and jax versions, in one place.

Supported: torch 2.11 to 2.13 and jax 0.10 to 0.11.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any


def x64_enabled() -> bool:
    """Whether the caller's JAX code keeps 64-bit dtypes."""
    import jax

    return bool(jax.config.read("jax_enable_x64"))


def enable_x64() -> contextlib.AbstractContextManager[Any]:
    """A context in which JAX keeps 64-bit dtypes, for this thread only (jax: `jax.enable_x64(True)`)."""
    import jax

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64 as experimental_enable_x64  # type: ignore[attr-defined]

    return experimental_enable_x64()


def check_cache_entries(damaged: Callable[[pathlib.Path], None]) -> None:
    """Have JAX call `damaged(file)` for an entry of its persistent cache that cannot be unpacked, and compile as if there were none.

    On its own JAX warns and compiles at every run: it never writes over an entry that is there, and a process that is killed leaves half of one.
    """
    try:
        from jax._src.compilation_cache import decompress_executable
        from jax._src.lru_cache import LRUCache
    except ImportError:  # a JAX that keeps them elsewhere: its own warning stays
        return
    get = LRUCache.get

    def checked(self: Any, key: str) -> bytes | None:
        packed = get(self, key)
        if packed is not None:
            try:
                decompress_executable(packed)
            except Exception:
                damaged(pathlib.Path(str(self.path)) / f"{key}-cache")
                return None
        return packed

    LRUCache.get = checked  # type: ignore[method-assign]


def linear_cross_entropy_ops() -> tuple[Any, Any] | None:
    """torch's chunked `linear_cross_entropy` with and without reduction, or None before torch 2.13."""
    import torch

    try:
        import torch.nn.modules.linear_cross_entropy  # registers them
    except ImportError:
        return None
    ops = torch.ops.torch_nn
    return ops._linear_cross_entropy_batch_chunked.default, ops._linear_cross_entropy_batch_chunked_no_reduction.default
