"""Pictures for notebooks and files: the torus with its groups and its traffic, who holds which part of a tensor, memory against the HBM.

Each function gives a `matplotlib.figure.Figure` that notebooks show by themselves, and saves it as well if it gets a `path`. They need matplotlib; nothing
of its global state (pyplot) is used.
"""

from nxd_jax.inspect.pictures.blocks import Block, Slices, slices
from nxd_jax.inspect.pictures.memory import memory_picture
from nxd_jax.inspect.pictures.sharding import sharding_picture
from nxd_jax.inspect.pictures.torus import topology_picture

__all__ = ["Block", "Slices", "memory_picture", "sharding_picture", "slices", "topology_picture"]
