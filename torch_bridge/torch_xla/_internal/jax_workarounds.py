"""`torch_xla._internal.jax_workarounds`: JAX is always there."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any


def jax_import_guard() -> None:
    """`jax_workarounds.jax_import_guard`: nothing to do, everything runs on JAX."""


def requires_jax(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`jax_workarounds.requires_jax`: the function."""
    return fn


def maybe_get_jax() -> Any:
    """`jax_workarounds.maybe_get_jax`: JAX."""
    import jax

    return jax


def maybe_get_torchax() -> Any:
    """`jax_workarounds.maybe_get_torchax`: torchax, where it is installed, else None."""
    return importlib.import_module("torchax") if importlib.util.find_spec("torchax") is not None else None
