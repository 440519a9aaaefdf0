"""`neuronx_distributed.scripts.checkpoint_converter`: the class that users' converters subclass."""

from nxd_jax.training.converters.base import CheckpointConverterBase

__all__ = ["CheckpointConverterBase"]
