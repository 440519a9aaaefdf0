"""What the hardware reaches of what it could, from documents; the same for every model and machine."""

from __future__ import annotations

from dataclasses import dataclass

LANES = 128
"""Elements that the Vector and the Scalar engine of a physical core each take in a clock cycle: one for each partition of SBUF."""

VECTOR_HERTZ = {"v2": 1.12e9, "v3": 0.96e9}
"""Clock of the Vector engine by generation of NeuronCore, 1/s."""

SCALAR_HERTZ = {"v2": 1.4e9, "v3": 1.2e9}
"""Clock of the Scalar engine, 1/s."""


@dataclass(frozen=True)
class Constants:
    """Parts of the peaks that are reached, and how long a hop takes.

    tensor: of the Tensor engine's peak. vector: of the Vector and Scalar engines'. memory: of HBM bandwidth. wire: of the bandwidth of links and of EFA.
    hop_seconds, network_hop_seconds: each step of a collective adds this, within an instance and between instances.
    """

    tensor: float = 1.0
    vector: float = 1.0
    memory: float = 1.0
    wire: float = 1.0
    hop_seconds: float = 2e-6
    network_hop_seconds: float = 15e-6


PEAK = Constants()
"""Everything at its peak; only the hops take time of their own."""

DOCUMENTED = Constants(tensor=0.9, vector=0.9, memory=0.6, wire=0.72)
"""What the documents call good, or print as measured.

tensor, vector, memory: the NKI performance guide calls an engine that is busy 90 % of the time, and 60 % of the memory bandwidth, good in practice.
wire: the largest all-reduce among the samples of `nccom-test` (64 ranks on 2 instances, 1 GB in 41.8 ms) against what `traffic` makes of it on
trn1.32xlarge at full bandwidth (30.2 ms). hop_seconds: the documents say 1-2 us. network_hop_seconds: they say about 15 us.
"""
