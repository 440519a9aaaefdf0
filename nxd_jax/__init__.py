"""nxd_jax: NeuronX Distributed scripts on JAX.

So far the package holds its version only: single-worker scripts need `torch_bridge` and the `torch_xla` facade. Meshes and NxD's parallel layers come here.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
