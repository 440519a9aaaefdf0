"""`neuronx_distributed.parallel_layers.random`: random numbers that tensor parallel ranks share, and some that they do not."""

from nxd_jax.tensor_parallel.random import (
    _MODEL_PARALLEL_RNG_TRACKER_NAME,
    State,
    XLARNGStatesTracker,
    get_xla_rng_tracker,
    model_parallel_xla_manual_seed,
)

__all__ = [
    "_MODEL_PARALLEL_RNG_TRACKER_NAME",
    "State",
    "XLARNGStatesTracker",
    "get_xla_rng_tracker",
    "model_parallel_xla_manual_seed",
]
