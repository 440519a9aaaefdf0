"""What runs models that `torch_neuronx.trace` compiled: can be imported, not used."""

from __future__ import annotations

from typing import Any

import torch

_TRACED = "which is not in this release. " + (
    "To run the model, move it to the device: model.eval().to('xla'); to compile it as a JAX function: jax.jit(torch_bridge.to_jax(model))."
)


def trace(func: Any, example_inputs: Any = None, *args: object, **kwargs: object) -> Any:
    """`torch_neuronx.trace`: not in this release."""
    raise NotImplementedError(
        "torch_neuronx.trace (ahead-of-time compilation for inference) is not in this release. To run the model, move it to the device: "
        "model.eval().to('xla'); to compile it as a JAX function: jax.jit(torch_bridge.to_jax(model)); to look at its graph: "
        "torch_bridge.hlo(model, inputs)."
    )


def analyze(*args: object, **kwargs: object) -> Any:
    """`torch_neuronx.analyze`: not in this release."""
    raise NotImplementedError(
        "torch_neuronx.analyze (which operators the Neuron compiler supports) is not in this release. Here every torch operator runs: those "
        "without a JAX lowering on the CPU, with a warning that names them."
    )


def dynamic_batch(neuron_script: Any) -> Any:
    """`torch_neuronx.dynamic_batch`: not in this release."""
    raise NotImplementedError(
        "torch_neuronx.dynamic_batch needs torch_neuronx.trace, which is not in this release; pad batches to one size"
    )


def bucket_model_trace(*args: object, **kwargs: object) -> Any:
    """`torch_neuronx.bucket_model_trace`: not in this release."""
    raise _needs_trace("bucket_model_trace")


def async_load(trace: Any) -> None:
    """`torch_neuronx.async_load`: not in this release."""
    raise _needs_trace("async_load")


def lazy_load(trace: Any, enable_lazy_load: bool = True) -> None:
    """`torch_neuronx.lazy_load`: not in this release."""
    raise _needs_trace("lazy_load")


def move_trace_to_device(trace: Any, device_id: int) -> None:
    """`torch_neuronx.move_trace_to_device`: not in this release."""
    raise _needs_trace("move_trace_to_device")


def replace_weights(neuron_model: Any, weights: Any) -> None:
    """`torch_neuronx.replace_weights`: not in this release."""
    raise _needs_trace("replace_weights")


class DataParallel(torch.nn.Module):
    """`torch_neuronx.DataParallel`: raises NotImplementedError when constructed."""

    def __init__(self, *args: object, **kwargs: object):
        raise _needs_trace("DataParallel")


class BucketModelConfig:
    """`torch_neuronx.BucketModelConfig`: raises NotImplementedError when constructed."""

    def __init__(self, *args: object, **kwargs: object):
        raise _needs_trace("BucketModelConfig")


class PartitionerConfig:
    """`torch_neuronx.PartitionerConfig`: raises NotImplementedError when constructed."""

    def __init__(self, *args: object, **kwargs: object):
        raise _needs_trace("PartitionerConfig")


def _needs_trace(name: str) -> NotImplementedError:
    return NotImplementedError(f"torch_neuronx.{name} needs torch_neuronx.trace, {_TRACED}")
