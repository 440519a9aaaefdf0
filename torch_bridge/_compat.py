"""Every difference between supported torch and jax versions, in one place.

Supported: torch 2.11 to 2.13 and jax 0.10 to 0.11.
"""

from __future__ import annotations

import contextlib
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
