"""`torch_neuronx.xla_impl`."""
