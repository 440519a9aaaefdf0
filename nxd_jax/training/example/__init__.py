"""`nxdt-train --example`: a first training without anything at hand."""

from nxd_jax.training.example.running import run_example

__all__ = ["run_example"]
