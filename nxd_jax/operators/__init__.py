"""`neuronx_distributed.operators`: argmax and top-k of tensors that are divided among ranks. (`topk` is the module here, as it is there.)"""

from nxd_jax.operators.argmax import argmax

__all__ = ["argmax"]
