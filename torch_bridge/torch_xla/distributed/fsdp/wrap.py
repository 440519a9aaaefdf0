"""`torch_xla.distributed.fsdp.wrap`: the wrapping policies, which are torch's own."""

from torch.distributed.fsdp.wrap import (
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

__all__ = ["always_wrap_policy", "lambda_auto_wrap_policy", "size_based_auto_wrap_policy", "transformer_auto_wrap_policy"]
