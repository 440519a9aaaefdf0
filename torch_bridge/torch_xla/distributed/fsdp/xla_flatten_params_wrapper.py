"""`torch_xla.distributed.fsdp.xla_flatten_params_wrapper`: the wrapper inside of a wrapper."""

from torch_bridge.fsdp.inner import XlaFlattenParamsWrapper

__all__ = ["XlaFlattenParamsWrapper"]
