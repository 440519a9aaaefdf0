"""A model on ranks: what memory and time are estimated from."""

from __future__ import annotations

import dataclasses
import itertools
import math

from nxd_jax.inspect.estimate import Transformer
from nxd_jax.training.config.facts import Facts


@dataclasses.dataclass(frozen=True)
class Setup:
    """tp, pp, cp, ep, dp, vpp: ranks of each kind, and chunks of a stage. gbs, mbs: rows of a step and of a micro-batch. seq: tokens of a row. stages:
    layers of each pipeline stage. itemsize: bytes of a weight. masters: float32 weights in the optimizer. wide_gradients: gradients in float32. flash:
    blockwise attention. recomputed: names of what the backward pass computes again, ("full",): all. capacity_factor: of experts. positions: rows of
    the table of learned ones.
    """

    model: Transformer
    tp: int
    pp: int
    cp: int
    ep: int
    dp: int
    vpp: int
    gbs: int
    mbs: int
    seq: int
    stages: tuple[int, ...]
    sequence_parallel: bool
    zero1: bool
    itemsize: int
    masters: bool
    wide_gradients: bool
    optimizer: str
    momentum: bool
    flash: bool
    recomputed: tuple[str, ...]
    reduce_float32: bool
    capacity_factor: float | None
    positions: int

    @property
    def microbatches(self) -> int:
        return self.gbs // (self.dp * self.mbs)

    @property
    def tokens(self) -> int:
        """Of a micro-batch on a rank."""
        return self.mbs * self.seq // self.cp

    @property
    def full(self) -> bool:
        """Whether whole layers are computed again."""
        return "full" in self.recomputed or any(name.endswith("DecoderLayer") for name in self.recomputed)

    @property
    def sp(self) -> int:
        """Ranks that share norms and residuals."""
        return self.tp if self.sequence_parallel else 1


def of(facts: Facts) -> Setup | None:
    """From a configuration; None where numbers are missing or do not divide."""
    model, dp = facts.transformer(), facts.dp
    pp = facts.size("pp")
    if (
        model is None
        or not dp
        or not facts.microbatches
        or not facts.seq
        or model.layers < pp * facts.size("vpp")
        or model.heads % facts.size("tp")
    ):
        return None
    if model.experts % facts.size("ep") or (not model.experts and facts.size("ep") > 1) or dp % facts.size("ep"):
        return None
    return Setup(
        model=model,
        tp=facts.size("tp"),
        pp=pp,
        cp=facts.size("cp"),
        ep=facts.size("ep"),
        dp=dp,
        vpp=facts.size("vpp"),
        gbs=facts.gbs,
        mbs=facts.mbs,
        seq=facts.seq,
        stages=_stages(facts, model.layers, pp),
        sequence_parallel=facts.sequence_parallel,
        zero1=facts.zero1,
        itemsize=facts.itemsize,
        masters=facts.masters,
        wide_gradients=facts.wide_gradients,
        optimizer=facts.optimizer or "adamw",
        momentum=bool(facts.get("model.optim.momentum")),
        flash=facts.flash,
        recomputed=facts.recomputed,
        reduce_float32=facts.precision == "fp32" or facts.get("precision.parallel_layers_reduce_dtype") == "fp32",
        capacity_factor=facts.capacity_factor,
        positions=facts.positions,
    )


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as equal as they can be, the first ones larger."""
    return tuple(layers // stages + (k < layers % stages) for k in range(stages))


def _stages(facts: Facts, layers: int, pp: int) -> tuple[int, ...]:
    cuts = facts.get("model.pipeline_cuts", [])
    ends = [int(str(c).rpartition(".")[2]) + 1 for c in cuts if str(c).rpartition(".")[2].isdigit()]
    if len(ends) != pp - 1 or facts.size("vpp") > 1 or ends != sorted(set(ends)) or (ends and ends[-1] >= layers):
        return even(layers, pp)
    bounds = [0, *ends, layers]
    return tuple(b - a for a, b in itertools.pairwise(bounds))


def kv_width(setup: Setup) -> float:
    """Width of k on a core: a head at least."""
    return max(setup.model.kv_size / setup.tp, setup.model.q_size / setup.model.heads)


def in_flight(setup: Setup, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once (1F1B, interleaved if there are chunks)."""
    if setup.pp == 1:
        return 1
    waiting = setup.pp - stage + (setup.pp * (setup.vpp - 1) + setup.pp - stage - 1 if setup.vpp > 1 else 0) / setup.vpp
    return min(math.ceil(waiting) if setup.vpp == 1 else waiting, setup.microbatches)
