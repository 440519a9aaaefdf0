"""`neuronx_distributed.trainer`: one configuration, and a model, an optimizer and checkpoints that follow it."""

from nxd_jax.trainer.trainer import initialize_parallel_model, initialize_parallel_optimizer, neuronx_distributed_config

__all__ = ["initialize_parallel_model", "initialize_parallel_optimizer", "neuronx_distributed_config"]
