"""`neuronx_distributed.parallel_layers.loss_functions`: losses of logits whose vocabulary is cut over the tensor-parallel ranks."""

from nxd_jax.tensor_parallel.cross_entropy import DistributedLogprob, from_parallel_logits_to_logprobs, parallel_cross_entropy

__all__ = [
    "DistributedLogprob",
    "from_parallel_logits_to_logprobs",
    "parallel_cross_entropy",
]
