"""`torch_neuronx`: the very modules of `torch_bridge.torch_neuronx`."""

from torch_bridge.device import aliasing

aliasing.install(__name__, "torch_bridge.torch_neuronx")
