"""`torch_neuronx` on JAX: the names that Neuron training scripts import. Importing it brings in `torch_xla`, as the original does."""

from __future__ import annotations

from torch_bridge.device import aliasing

aliasing.refuse_original("torch-neuronx")
aliasing.install("torch_neuronx", __name__)

from torch_bridge import torch_xla as _torch_xla  # noqa: E402, F401
from torch_bridge.aot import script_files  # noqa: E402
from torch_bridge.torch_neuronx import contexts, experimental, neuron_classes, xla_impl  # noqa: E402
from torch_bridge.torch_neuronx.inference import (  # noqa: E402
    BucketModelConfig,
    DataParallel,
    PartitionerConfig,
    analyze,
    async_load,
    bucket_model_trace,
    dynamic_batch,
    lazy_load,
    move_trace_to_device,
    replace_weights,
    trace,
)
from torch_bridge.torch_neuronx.xla_impl.ops import nki_jit  # noqa: E402

neuron_classes.install()
script_files.loads("traced module", "torch_bridge.aot.traced_module:loaded")

__version__ = "2.9.0.2.12.0"
"""PyTorch's release and the SDK's, as the original writes it."""

__all__ = [
    "BucketModelConfig",
    "DataParallel",
    "PartitionerConfig",
    "__version__",
    "analyze",
    "async_load",
    "bucket_model_trace",
    "contexts",
    "dynamic_batch",
    "experimental",
    "lazy_load",
    "move_trace_to_device",
    "nki_jit",
    "replace_weights",
    "trace",
    "xla_impl",
]
