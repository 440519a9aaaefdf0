"""`torch_xla.distributed.fsdp.wrap`: wrapping policies, and the walk that asks them."""

from torch_bridge.fsdp.wrapping import (
    always_wrap_policy,
    lambda_auto_wrap_policy,
    recursive_wrap,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

__all__ = ["always_wrap_policy", "lambda_auto_wrap_policy", "recursive_wrap", "size_based_auto_wrap_policy", "transformer_auto_wrap_policy"]
