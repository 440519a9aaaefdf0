"""`torch_neuronx.xla_impl.custom_op`: C++ operators for the chip's GPSIMD engine. Not provided."""

from __future__ import annotations

from typing import Any


def load(*args: object, **kwargs: object) -> Any:
    """`custom_op.load`: raises NotImplementedError."""
    raise NotImplementedError(
        "torch_neuronx.xla_impl.custom_op.load compiles C++ for Neuron hardware. Here write the operator in JAX: torch.library.custom_op "
        "and @torch_bridge.lowerings.lowering."
    )


load_library = load
