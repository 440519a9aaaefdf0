"""`neuronx_distributed_training._version`: the version of this distribution, which stands for all releases of the original."""

from nxd_jax._distribution import __version__

__all__ = ["__version__"]
