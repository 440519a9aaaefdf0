"""`neuronx_distributed.parallel_layers.grads`: the norm of a divided model's gradients, clipping, and the reductions between `backward` and `step`."""

from nxd_jax.tensor_parallel.grads import (
    allreduce_context_parallel_gradients,
    allreduce_sequence_parallel_gradients,
    bucket_allreduce_gradients,
    clip_grad_norm,
    clip_grads_with_norm,
    get_grad_norm,
    param_is_not_shared,
    shares_of,
)

__all__ = [
    "allreduce_context_parallel_gradients",
    "allreduce_sequence_parallel_gradients",
    "bucket_allreduce_gradients",
    "clip_grad_norm",
    "clip_grads_with_norm",
    "get_grad_norm",
    "param_is_not_shared",
    "shares_of",
]
