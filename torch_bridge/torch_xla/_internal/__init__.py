"""`torch_xla._internal`: the few private names that scripts import."""
