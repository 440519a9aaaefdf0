"""`torch_xla.core.xla_builder`: building XLA computations by hand. Not provided; each name says what to do instead."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise NotImplementedError(
        f"torch_xla.core.xla_builder.{name}: building XLA computations by hand is not supported. Write the computation in JAX: define an "
        "op with "
        "torch.library.custom_op and register its JAX function with @torch_bridge.lowerings.lowering(torch.ops.<namespace>.<op>.default)."
    )
