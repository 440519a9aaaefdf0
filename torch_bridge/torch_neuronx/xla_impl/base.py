"""`torch_neuronx.xla_impl.base`: operators written in HLO. Not provided."""

from __future__ import annotations

from typing import Any


def xla_call(*args: object, **kwargs: object) -> Any:
    """`base.xla_call`: raises NotImplementedError."""
    raise NotImplementedError(
        "torch_neuronx.xla_impl.base.xla_call makes an operator of HLO written by hand. Here write the operator in JAX: torch.library.custom_op "
        "and @torch_bridge.lowerings.lowering."
    )
