"""`torch_neuronx.experimental`: the profiler; placing traced models on cores can be imported, not used."""

from torch_bridge.torch_neuronx.experimental import placement, profiler
from torch_bridge.torch_neuronx.experimental.placement import multicore_context, neuron_cores_context, set_multicore, set_neuron_cores

__all__ = ["multicore_context", "neuron_cores_context", "placement", "profiler", "set_multicore", "set_neuron_cores"]
