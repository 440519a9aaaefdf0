"""`torch_xla.core.dynamo_bridge`: the older name of `torch_xla._dynamo.dynamo_bridge`."""

from torch_bridge.torch_xla._dynamo.dynamo_bridge import extract_compiled_graph

__all__ = ["extract_compiled_graph"]
