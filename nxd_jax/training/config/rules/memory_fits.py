"""Whether a core's memory is enough."""

from __future__ import annotations

from nxd_jax.training.config import memory, setup
from nxd_jax.training.config.facts import Facts
from nxd_jax.training.config.problems import Problems


def check(facts: Facts, problems: Problems) -> None:
    found, topology = setup.of(facts), facts.topology()
    if found is None or topology is None:
        return
    held = memory.of(found, topology)
    if not held.fits:
        problems.warn(
            "distributed_strategy",
            f"a core needs about {held.total / 2**30:.1f} GiB of its {held.hbm / 2**30:g} GiB: more tensor or pipeline parallel ranks, activations_checkpoint_"
            "granularity: full, or fusions.flash_attention: True take less; nxdt-train --plan prints layouts that fit",
        )
