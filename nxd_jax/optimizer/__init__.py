"""`neuronx_distributed.optimizer`: ZeRO-1 for models that tensor- and expert-parallel ranks share out."""

from nxd_jax.optimizer.zero_redundancy_optimizer import NeuronEPZero1Optimizer, NeuronZero1Optimizer

__all__ = ["NeuronEPZero1Optimizer", "NeuronZero1Optimizer"]
