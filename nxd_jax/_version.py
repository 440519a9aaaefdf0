"""`neuronx_distributed._version`: the release of neuronx_distributed whose names are here, for scripts and libraries that ask.

The version of this distribution is `importlib.metadata.version("nxd-jax")`.
"""

__version__ = "0.18.0"
