"""`torch_neuronx` on JAX: the names that Neuron training scripts import. Importing it brings in `torch_xla`, as the original does."""

from __future__ import annotations

from typing import Any

from torch_bridge import aliasing

aliasing.refuse_original("torch-neuronx")
aliasing.install("torch_neuronx", __name__)

from torch_bridge import torch_xla as _torch_xla  # noqa: E402, F401

__version__ = "2.9.0.2.12.0"
"""PyTorch's release and the SDK's, as the original writes it."""


def trace(func: Any, example_inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`torch_neuronx.trace`: not in this release."""
    raise NotImplementedError(
        "torch_neuronx.trace (ahead-of-time compilation for inference) is not in this release. To run the model, move it to the device: "
        "model.eval().to('xla'); to compile it as a JAX function: jax.jit(torch_bridge.to_jax(model)); to look at its graph: "
        "torch_bridge.hlo(model, inputs)."
    )


def dynamic_batch(neuron_script: Any) -> Any:
    """`torch_neuronx.dynamic_batch`: not in this release."""
    raise NotImplementedError(
        "torch_neuronx.dynamic_batch needs torch_neuronx.trace, which is not in this release; pad batches to one size"
    )


def async_load(trace: Any) -> None:
    """`torch_neuronx.async_load`: not in this release."""
    raise NotImplementedError("torch_neuronx.async_load needs torch_neuronx.trace, which is not in this release")


__all__ = ["__version__", "async_load", "dynamic_batch", "trace"]
