"""Rules between keys: each module has `check(facts, problems)`, which adds what it finds."""

from __future__ import annotations

from nxd_jax.training.config.facts import Facts
from nxd_jax.training.config.problems import Problems
from nxd_jax.training.config.rules import (
    alignment,
    batches,
    checkpoints,
    experts,
    files,
    layout,
    megatron,
    megatron_sets,
    memory_fits,
    model,
    optimization,
    precision,
    sets,
)

__all__ = ["check_all"]

ORDER = (
    files,
    layout,
    batches,
    model,
    experts,
    megatron,
    optimization,
    precision,
    checkpoints,
    alignment,
    sets,
    megatron_sets,
    memory_fits,
)


def check_all(facts: Facts, problems: Problems) -> None:
    """All of them, in an order in which files are read before what needs their contents."""
    for module in ORDER:
        module.check(facts, problems)
