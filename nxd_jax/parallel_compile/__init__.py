"""The command `neuron_parallel_compile` (`command`): fill the cache of compiled programs before a training run."""

from nxd_jax.parallel_compile.graphs import Graph, Graphs

__all__ = ["Graph", "Graphs"]
