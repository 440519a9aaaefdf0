"""`torch_neuronx.distributed`."""
