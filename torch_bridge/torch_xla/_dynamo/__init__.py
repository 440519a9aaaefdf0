"""`torch_xla._dynamo`: what stands between `torch.compile` and the device."""
