"""`torch_neuronx.testing`."""

from torch_bridge.torch_neuronx.testing.validation import assert_close, logit_validation, neuron_allclose

__all__ = ["assert_close", "logit_validation", "neuron_allclose"]
