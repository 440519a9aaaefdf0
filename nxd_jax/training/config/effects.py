"""Keys that count only together with others, and have no effect as they stand."""

from __future__ import annotations

from nxd_jax.training.config.facts import Facts
from nxd_jax.training.config.keys.top import MANUAL_ONLY


def without_effect(facts: Facts) -> list[tuple[str, str]]:
    """(key, why) of those that are in the file."""
    found: list[tuple[str, str]] = []
    if facts.precision != "manual":
        found += [(f"precision.{key}", "read if precision.type is manual only") for key in MANUAL_ONLY]
    if facts.hf or facts.megatron:
        found.append(("model.use_cpu_initialization", "where weights are made; each rank makes its part on the host"))
    if facts.hf:
        found.append(("model.moe.routing_algorithm", "Hugging Face's Mixtral chooses by top_k"))
    found.append(("model.optim.capturable", "whether CUDA graphs may hold the optimizer's step"))
    return [(key, why) for key, why in found if facts.has(key)]
