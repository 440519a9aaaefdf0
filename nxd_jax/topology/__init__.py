"""Trn1, Trn2 and Inf2 machines as data: chips, cores, links, memory, and which ranks and JAX devices sit where.

topology = Topology("trn2.48xlarge")
print(topology)                                     # the torus as text
topology.check(tp=8)                                # what the hardware would not like
mesh = topology.mesh(tp=4)                          # jax.sharding.Mesh, axes (pp, dp, cp, tp)
"""

from nxd_jax.topology import pictures
from nxd_jax.topology.chips import INFERENTIA2, TRAINIUM1, TRAINIUM1N, TRAINIUM2, Chip
from nxd_jax.topology.environment import parse_cores
from nxd_jax.topology.instances import INSTANCES, Instance, instance
from nxd_jax.topology.layouts import Groups
from nxd_jax.topology.links import Link
from nxd_jax.topology.topology import Core, Topology

__all__ = [
    "INFERENTIA2",
    "INSTANCES",
    "TRAINIUM1",
    "TRAINIUM1N",
    "TRAINIUM2",
    "Chip",
    "Core",
    "Groups",
    "Instance",
    "Link",
    "Topology",
    "instance",
    "parse_cores",
    "pictures",
]
