"""`torch_neuronx.experimental`: the profiler, and placing traced models on cores."""

from torch_bridge.torch_neuronx.experimental import placement, profiler
from torch_bridge.torch_neuronx.experimental.placement import multicore_context, neuron_cores_context, set_multicore, set_neuron_cores

__all__ = ["multicore_context", "neuron_cores_context", "placement", "profiler", "set_multicore", "set_neuron_cores"]
