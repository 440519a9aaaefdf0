"""`libneuronxla`: the very module of `torch_bridge.libneuronxla`."""

from torch_bridge.device import aliasing

aliasing.install(__name__, "torch_bridge.libneuronxla")
