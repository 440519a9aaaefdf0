"""`torch_neuronx.testing`."""

from torch_bridge.torch_neuronx.testing.validation import assert_close, neuron_allclose

__all__ = ["assert_close", "neuron_allclose"]
