"""`neuronx_distributed_training.utils`."""

from nxd_jax.training.utils.throughput import Throughput

__all__ = ["Throughput"]
