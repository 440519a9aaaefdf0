"""The time of a training step on the machine, and the share of its peak, by `nxd_jax.inspect.estimate`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nxd_jax.inspect.collectives import Collective
from nxd_jax.inspect.estimate import Estimate, Work, estimate, transformer_work
from nxd_jax.topology import Topology
from nxd_jax.training.config.setup import Setup, kv_width


@dataclass(frozen=True)
class StepTime:
    """estimate: every term. mfu: the model's own operations (6 for each parameter and token, attention in full, nothing computed again) as a part of the
    tensor engines' peak."""

    estimate: Estimate
    mfu: float

    @property
    def seconds(self) -> float:
        return self.estimate.seconds

    @property
    def slowest(self) -> list[tuple[str, float]]:
        """The three terms that take longest, in seconds."""
        found = sorted(self.estimate.terms, key=lambda t: -t.seconds)
        return [(t.name, t.seconds) for t in found[:3]]


def of(setup: Setup, topology: Topology) -> StepTime:
    """Raises ValueError for sizes that do not divide."""
    found = estimate(work(setup), topology)
    cores = setup.tp * setup.pp * setup.cp * setup.dp
    peak = topology.peak_flops_per_core("bfloat16" if setup.itemsize == 2 else "float32") * cores
    return StepTime(found, flops(setup) / (found.seconds * peak))


def flops(setup: Setup) -> float:
    """Of a step, of the whole model, forward and backward."""
    m = setup.model
    active = m.active_parameters - (0 if m.tied else m.vocabulary * m.hidden)
    return setup.gbs * setup.seq * (6.0 * active + 12.0 * m.layers * m.q_size * setup.seq)


def work(setup: Setup) -> Work:
    """What a core does. Context-parallel ranks are taken as data-parallel ones with a part of each sequence, whose attention sees all of it."""
    if setup.full:
        recompute = "full"
    else:
        recompute = "selective" if "CoreAttention" in setup.recomputed else "none"
    alone = setup.vpp == 1  # 1F1B waits (pp - 1) / micro-batches: one of them is worked out, and taken so often
    found = transformer_work(
        setup.model,
        seq=setup.seq // setup.cp,
        global_batch=(setup.dp * setup.mbs if alone else setup.gbs) * setup.cp,
        micro_batch=setup.mbs,
        tp=setup.tp,
        pp=setup.pp,
        dp=setup.dp * setup.cp,
        sequence_parallel=setup.sequence_parallel,
        zero1=setup.zero1,
        recompute=recompute,
        flash=setup.flash,
        precision="float32" if setup.itemsize == 4 else "bfloat16",
        reduce_dtype="float32" if setup.reduce_float32 else "bfloat16",
        gradient_dtype="float32" if setup.wide_gradients else "bfloat16",
        master_weights=setup.masters,
        schedule="interleaved" if setup.vpp > 1 else "1f1b",
        chunks=setup.vpp if setup.vpp > 1 else None,
        ep=setup.ep,
        capacity_factor=setup.capacity_factor,
    )
    found = _repeated(found, setup) if alone else found
    return found if setup.cp == 1 else _along_cp(found, setup)


def _repeated(found: Work, setup: Setup) -> Work:
    """All micro-batches of a step, from one."""
    n = setup.microbatches
    return dataclasses.replace(
        found,
        phases=tuple(dataclasses.replace(p, flops=n * p.flops, elements=n * p.elements, bytes=n * p.bytes) for p in found.phases),
        collectives=tuple(dataclasses.replace(c, count=n * c.count, bytes=n * c.bytes) for c in found.collectives),
        microbatches=n,
        sequences=setup.gbs,
        tokens=setup.gbs * setup.seq,
        schedule_bubble=(setup.pp - 1) / n,
    )


def _along_cp(found: Work, setup: Setup) -> Work:
    """With attention over whole sequences, and K and V going round."""
    cp, layers = setup.cp, max(setup.stages)
    phases = tuple(
        dataclasses.replace(p, flops=p.flops * cp, elements=p.elements * cp) if p.name == "attention" else p for p in found.phases
    )
    size = round(2 * setup.tokens * kv_width(setup) * setup.itemsize)
    rounds = layers * setup.microbatches * (cp - 1) * 3  # K and V forward; again, with their gradients, backward
    ring = Collective(
        kind="permute", axes=("cp",), ranks=cp, count=rounds, bytes=rounds * size, dtype="bfloat16" if setup.itemsize == 2 else "float32"
    )
    axes = {"pp": setup.pp, "dp": setup.dp, "cp": cp, "tp": setup.tp}
    both = ("dp", "cp") if setup.dp > 1 else ("cp",)
    return dataclasses.replace(
        found,
        axes=axes,
        phases=phases,
        collectives=(*found.collectives, ring),
        reductions=tuple(dataclasses.replace(c, axes=both) if "dp" in c.axes else c for c in found.reductions),
        sequences=setup.gbs,
        tokens=setup.gbs * setup.seq,
    )
