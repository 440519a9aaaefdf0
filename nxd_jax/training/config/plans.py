"""`nxdt-train --plan`: layouts of a model on its machine that fit memory, by how long a step is estimated to take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from nxd_jax.inspect import units
from nxd_jax.inspect.tables import Column, Table
from nxd_jax.tensor_parallel import kv_groups
from nxd_jax.topology import Topology
from nxd_jax.training.config import checking, memory, setup, steptime, summary
from nxd_jax.training.config.facts import SIZES, Facts
from nxd_jax.training.config.memory import Memory
from nxd_jax.training.config.setup import Setup
from nxd_jax.training.config.steptime import StepTime

ROWS = 12
"""Layouts that are shown, besides the configured one."""

MOST_TP = 64
"""Tensor-parallel ranks of a layout, at most; all of one node."""


@dataclass(frozen=True)
class Plan:
    """A layout, what a core of it holds, and how long its step takes. configured: whether it is the file's own."""

    setup: Setup
    memory: Memory
    time: StepTime
    configured: bool = False


def plan(cfg: DictConfig) -> str:
    """The table of layouts as text. Raises ValueError for a configuration whose sizes are not known or do not divide; `--check` says which."""
    facts = checking.facts_of(cfg)
    found, topology = setup.of(facts), facts.topology()
    if found is None or topology is None:
        raise ValueError("the sizes of the model, its batches and ranks must be known and divide; nxdt-train --check says what is wrong")
    own = Plan(found, memory.of(found, topology), steptime.of(found, topology), configured=True)
    others = plans(facts, found, topology)
    return _text(facts, topology, own, [p for p in others if not _same(p.setup, found)])


def plans(facts: Facts, found: Setup, topology: Topology) -> list[Plan]:
    """All layouts that fit, fastest first; of each, with the least that is computed again."""
    made = []
    for candidate in layouts(facts, found):
        for recomputed in _recomputations(found):
            tried = dataclasses.replace(candidate, recomputed=recomputed)
            held = memory.of(tried, topology)
            if held.fits:
                made.append(Plan(tried, held, steptime.of(tried, topology)))
                break
    return sorted(made, key=lambda p: p.time.seconds)


def layouts(facts: Facts, found: Setup) -> Iterator[Setup]:
    """Sizes that divide what they must."""
    world = found.tp * found.pp * found.cp * found.dp
    for tp in _powers(min(facts.devices or 1, MOST_TP)):
        for pp in _divisors(world // tp if world % tp == 0 else 0):
            for cp in sorted({1, found.cp}):
                for ep in _divisors(found.model.experts or 1):
                    if world % (tp * pp * cp) or pp > found.model.layers:
                        continue
                    made = _laid_out(found, tp, pp, cp, ep, world // (tp * pp * cp))
                    if _divides(facts, made):
                        yield made


def _laid_out(found: Setup, tp: int, pp: int, cp: int, ep: int, dp: int) -> Setup:
    """The same model in another layout."""
    same = pp == found.pp
    return dataclasses.replace(
        found,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        dp=dp,
        vpp=found.vpp if same else 1,
        stages=found.stages if same else setup.even(found.model.layers, pp),
        sequence_parallel=tp > 1 and (found.sequence_parallel or found.tp == 1),
    )


def _divides(facts: Facts, made: Setup) -> bool:
    """Whether a layout's sizes divide what they must."""
    m, tp = made.model, made.tp
    length = made.seq // made.cp
    divide = (
        m.heads % tp,
        m.vocabulary % tp,
        (m.expert_width if m.experts else m.ffn) % tp,
        length % tp,
        made.gbs % (made.dp * made.mbs),
        made.dp % made.ep,
    )
    if any(divide) or (facts.megatron and (m.layers % made.pp or (m.tied and made.pp > 1))):
        return False
    kv = m.kv_heads or m.heads
    return bool(kv_copies(m.heads, kv, tp)) if facts.hf else kv % tp == 0


def kv_copies(heads: int, kv: int, tp: int) -> int:
    """The least kv_replicator with which K/V heads can be shared out; 0 if there is none."""
    return next(iter(kv_groups.fitting_copies(heads, kv, tp)), 0)


def _recomputations(found: Setup) -> list[tuple[str, ...]]:
    """From the fewest that is computed again to the most."""
    some: list[tuple[str, ...]] = [(), *([] if found.flash else [("CoreAttention",)]), found.recomputed, ("full",)]
    unique = list(dict.fromkeys(some))
    return sorted(unique, key=lambda names: (names == ("full",), len(names)))


def _powers(most: int) -> Iterator[int]:
    n = 1
    while n <= most:
        yield n
        n *= 2


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0] if n <= 4096 else list(_powers(n))


def _same(one: Setup, other: Setup) -> bool:
    return one == dataclasses.replace(other, recomputed=one.recomputed) and set(one.recomputed) == set(other.recomputed)


# -- the text ------------------------------------------------------------------------------------------


def _text(facts: Facts, topology: Topology, own: Plan, others: list[Plan]) -> str:
    shown = sorted([own, *others[:ROWS]], key=lambda p: p.time.seconds)
    left = len(others) - len(others[:ROWS])
    notes = [f"{left} more layouts fit, all slower than those above"] if left else []
    if not own.memory.fits:
        notes.append("the configured layout does not fit")
    title = (
        f"{facts.get('name')}: {summary.size(own.setup.model)}, {facts.gbs:,} rows of {facts.seq:,} tokens\n"
        f"{facts.nodes} x {topology.instance.name}, {topology.core_count:,} NeuronCores with {topology.hbm_per_core / 2**30:g} GiB each"
    )
    lines = [title, "", str(Table("", shown, _columns())), *notes]
    best = next((p for p in shown if p.memory.fits), None)
    if best is not None and not best.configured:
        faster = f": {own.time.seconds / best.time.seconds:.2f} times as fast as the configured one" if own.memory.fits else ""
        lines += ["", f"the fastest that fits, as overrides{faster}", *_overrides(facts, best, own)]
    if best is not None and best.configured:
        lines += ["", "the configured layout is the fastest of those that fit"]
    if best is None:
        lines += ["", "no layout fits: take more nodes (trainer.num_nodes), or a shorter model.encoder_seq_length"]
    return "\n".join(lines)


def _columns() -> list[Column]:
    return [
        Column("", lambda p: "configured" if p.configured else ""),
        *(Column(name, _size(name), number=True) for name in ("tp", "pp", "cp", "ep", "dp")),
        Column("computed again", lambda p: "every layer" if p.setup.full else ", ".join(p.setup.recomputed) or "nothing"),
        Column("memory", lambda p: f"{p.memory.total / 2**30:.1f} GiB" + ("" if p.memory.fits else " !"), number=True),
        Column("step", lambda p: units.seconds(p.time.seconds), number=True),
        Column("tokens/s", lambda p: f"{p.setup.gbs * p.setup.seq / p.time.seconds:,.0f}", number=True),
        Column("MFU", lambda p: f"{p.time.mfu:.1%}", number=True),
    ]


def _size(name: str) -> Any:
    return lambda p: getattr(p.setup, name)


def _overrides(facts: Facts, best: Plan, own: Plan) -> list[str]:
    """Words for the command line that turn the configured layout into the best one."""
    words = []
    for name in ("tp", "pp", "cp", "ep"):
        if getattr(best.setup, name) != getattr(own.setup, name):
            words.append(_word(facts, f"distributed_strategy.{SIZES[name]}", getattr(best.setup, name)))
    if best.setup.vpp != own.setup.vpp:
        words.append(_word(facts, f"distributed_strategy.{SIZES['vpp']}", best.setup.vpp))
    if facts.hf:
        copies = kv_copies(best.setup.model.heads, best.setup.model.kv_heads or best.setup.model.heads, best.setup.tp)
        if copies != facts.size("kv"):
            words.append(_word(facts, f"distributed_strategy.{SIZES['kv']}", copies))
    if best.setup.sequence_parallel != own.setup.sequence_parallel:
        words.append(_word(facts, "distributed_strategy.sequence_parallel", best.setup.sequence_parallel))
    if best.setup.pp != own.setup.pp and facts.get("model.pipeline_cuts"):
        words.append("model.pipeline_cuts=null")
    if best.setup.cp != own.setup.cp:
        words += ["model.fusions.ring_attention=False", _word(facts, "model.fusions.flash_attention", True)]
    if set(best.setup.recomputed) != set(own.setup.recomputed):
        words += _recompute_words(facts, best.setup)
    return [f"  {word}" for word in words]


def _recompute_words(facts: Facts, best: Setup) -> list[str]:
    granularity = "full" if best.full else "selective" if best.recomputed else "null"
    words = [_word(facts, "model.activations_checkpoint_granularity", granularity)]
    if granularity == "selective":
        words.append(_word(facts, "model.activations_checkpoint_recompute", f"[{','.join(best.recomputed)}]"))
    return words


def _word(facts: Facts, key: str, value: Any) -> str:
    return f"{'' if facts.has(key) else '+'}{key}={value}"
