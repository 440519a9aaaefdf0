"""`torch_neuronx.xla_impl.ops`: a memory hint, and kernels, which are not provided."""

from __future__ import annotations

from typing import Any


def set_unload_prior_neuron_models_mode(value: bool) -> None:
    """`ops.set_unload_prior_neuron_models_mode`: whether a core drops programs that ran before. Accepted without effect."""


def nki_jit(*args: object, **kwargs: object) -> Any:
    """`ops.nki_jit`: raises NotImplementedError."""
    raise NotImplementedError(
        "torch_neuronx.nki_jit compiles NKI kernels for Neuron hardware. For attention there is neuronx_distributed.kernels; write other kernels in "
        "JAX: torch.library.custom_op and @torch_bridge.lowerings.lowering."
    )
