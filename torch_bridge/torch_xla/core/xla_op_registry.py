"""`torch_xla.core.xla_op_registry`: custom ops from XLA computations. Not provided."""

from __future__ import annotations

from typing import Any


def register(name: str, opfn: Any) -> Any:
    """`xor.register`: not provided."""
    raise NotImplementedError(
        f"torch_xla.core.xla_op_registry.register({name!r}): write the op in JAX instead, with torch.library.custom_op and "
        "@torch_bridge.lowerings.lowering."
    )
