"""What a configuration runs, as lines: model, machine, ranks, batches, memory, time, learning rates, checkpoints."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence

from nxd_jax.inspect import units
from nxd_jax.inspect.estimate import Transformer
from nxd_jax.topology import Topology
from nxd_jax.training.config import memory, schedule, setup, steptime
from nxd_jax.training.config.facts import Facts
from nxd_jax.training.config.problems import WIDTH

LABEL = 16
"""Width of the first column."""


def lines(facts: Facts) -> list[str]:
    """The whole summary."""
    topology, found = facts.topology(), setup.of(facts)
    out = ["what runs"]
    out += rows([("model", _model(facts)), ("data", _data(facts)), ("machine", _machine(facts, topology)), ("ranks", _ranks(facts))])
    out += rows(
        [
            ("precision", _precision(facts)),
            ("computed again", _recompute(facts)),
            ("step", _step(facts)),
            ("training", _training(facts, found)),
        ]
    )
    seconds = None
    if found is None or topology is None:
        out += ["", "memory and time: not known, for sizes are missing or do not divide"]
    else:
        out += ["", *memory_lines(found, topology)]
        try:
            time = steptime.of(found, topology)
            seconds = time.seconds
            out += ["", *_time(facts, time)]
        except ValueError as error:  # what the estimate has no formula for
            out += ["", *rows([("time", f"not known: {error}")])]
    out += ["", *_rates(facts), "", *_checkpoints(facts, found, seconds)]
    return out


def rows(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Lines of a label and a text, which is broken where it is long; those without a text left out."""
    found: list[str] = []
    for label, text in pairs:
        if text:
            found += textwrap.wrap(
                text,
                WIDTH,
                initial_indent=f"  {label:<{LABEL}}",
                subsequent_indent=" " * (LABEL + 2),
                break_on_hyphens=False,
                break_long_words=False,
            )
    return found


def _model(facts: Facts) -> str:
    m = facts.transformer()
    if m is None:
        return f"{facts.kind}: its sizes are not known"
    experts = f", {m.experts} experts of which a token meets {m.top_k}" if m.experts else ""
    return (
        f"{facts.kind}, {size(m)}: {m.layers} layers, hidden {m.hidden:,}, {m.heads} heads ({m.kv_heads or m.heads} K/V), MLP {m.ffn:,}, "
        f"vocabulary {m.vocabulary:,}{experts}"
    )


def size(m: Transformer) -> str:
    """Parameters, and those that a token meets if these are fewer."""
    active = f" ({_billions(m.active_parameters)} of them meet each token)" if m.experts else ""
    return f"{_billions(m.parameters)} parameters{active}"


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e8 else f"{count:,}"


def _data(facts: Facts) -> str:
    said = facts.get("data.data_prefix" if facts.megatron else "data.train_dir")
    return "" if said is None else f"{said}" + (f", {facts.rows:,} rows" if facts.rows is not None else "")


def _machine(facts: Facts, topology: Topology | None) -> str:
    if topology is None or facts.world is None:
        return f"trainer.devices: {facts.get('trainer.devices')}"
    lnc = f" at LNC {topology.lnc}" if topology.lnc > 1 else ""
    part = f" ({facts.devices} cores of each)" if facts.devices != topology.instance.cores_per_node(topology.lnc) else ""
    return (
        f"{facts.nodes} x {topology.instance.name}{lnc}{part}: {facts.world:,} NeuronCores with {topology.hbm_per_core / 2**30:g} GiB each"
    )


def _ranks(facts: Facts) -> str:
    kinds = {name: facts.size(name) for name in ("tp", "pp", "cp")}
    text = " x ".join(f"{name} {n}" for name, n in kinds.items()) + f" x dp {facts.dp if facts.dp else '?'}"
    more = [f"ep {facts.size('ep')} within dp"] if facts.size("ep") > 1 else []
    more += [f"{facts.size('vpp')} chunks of each stage"] if facts.size("vpp") > 1 else []
    more += ["sequence parallel"] * facts.sequence_parallel + ["ZeRO-1"] * facts.zero1
    more += [f"each K/V head {facts.size('kv')} times"] if facts.size("kv") > 1 else []
    return ", ".join([text, *more])


def _precision(facts: Facts) -> str:
    if not facts.precision:
        return ""
    weights = "float32" if facts.itemsize == 4 else "bfloat16"
    rest = "float32 master weights, gradients added up in float32" if facts.masters else "no master weights"
    return f"{facts.precision}: {weights} on the device" + ("" if facts.itemsize == 4 else f", {rest}")


def _recompute(facts: Facts) -> str:
    names = facts.recomputed
    return "nothing" if not names else "every layer" if names == ("full",) else ", ".join(names)


def _step(facts: Facts) -> str:
    if not facts.gbs or not facts.seq:
        return ""
    n = facts.microbatches
    parts = f"; each of {facts.dp} dp ranks takes {units.many(n, 'micro-batch').replace('batchs', 'batches')} of {facts.mbs}" if n else ""
    return f"{facts.gbs:,} rows of {facts.seq:,} tokens = {facts.gbs * facts.seq:,} tokens{parts}"


def _training(facts: Facts, found: setup.Setup | None) -> str:
    if facts.steps < 1:
        return ""
    rows_ = facts.steps * facts.gbs
    text = f"{facts.steps:,} steps = {rows_:,} rows = {number(rows_ * facts.seq)} tokens"
    if facts.rows:
        text += f", {rows_ / facts.rows:,.4g} times through the set"
    return text + (f", {rows_ * facts.seq / found.model.active_parameters:,.3g} for each parameter" if found else "")


def number(n: float) -> str:
    """A large number in words."""
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if n >= unit:
            return f"{n / unit:,.4g} {name}"
    return f"{n:,.0f}"


def memory_lines(found: setup.Setup, topology: Topology) -> list[str]:
    """The table of memory."""
    m = memory.of(found, topology)
    where = f", pipeline stage {m.stage} of {found.pp} (the one that takes most)" if found.pp > 1 else ""
    parts = [
        ("weights", m.weights),
        ("gradients", m.gradients),
        ("optimizer", m.optimizer),
        ("activations", m.activations),
        ("working memory", m.working),
    ]
    table = [(name, f"{value / 2**30:8.2f} GiB") for name, value in parts]
    verdict = "fits" if m.fits else "DOES NOT FIT" if m.total > m.hbm else "is tight: programs and collectives need some, too"
    total = f"{m.total / 2**30:8.2f} GiB of {m.hbm / 2**30:g} GiB ({m.total / m.hbm:.0%}): {verdict}"
    return [f"memory of a core, estimated{where}", *rows([*table, ("all", total)])]


def _time(facts: Facts, time: steptime.StepTime) -> list[str]:
    step = f"{units.seconds(time.seconds)}: {facts.gbs / time.seconds:,.3g} rows/s, {facts.gbs * facts.seq / time.seconds:,.0f} tokens/s"
    whole = duration(time.seconds * facts.steps) if facts.steps > 0 else ""
    most = ", ".join(f"{name} {units.seconds(s)}" for name, s in time.slowest)
    peak = f"{time.mfu:.1%} (MFU: 6 operations for each parameter and token, and attention in full)"
    return ["time, estimated", *rows([("step", step), ("all steps", whole), ("of the peak", peak), ("longest parts", most)])]


def duration(seconds: float) -> str:
    """Days, hours or minutes."""
    for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:.1f} seconds"


def _rates(facts: Facts) -> list[str]:
    rates = schedule.of(facts)
    if rates is None:
        return ["learning rate: not known"]
    points = rates.rows()
    widths = [max(len(f"{s:,}"), len(f"{r:.2e}")) for s, r in points]
    return [
        f"learning rate ({rates.name}, optimizer {facts.get('model.optim.name')})",
        "  step  " + "  ".join(f"{s:,}".rjust(w) for (s, _), w in zip(points, widths, strict=True)),
        "  rate  " + "  ".join(f"{r:.2e}".rjust(w) for (_, r), w in zip(points, widths, strict=True)),
        f"        |{schedule.spark(rates)}|",
    ]


def _checkpoints(facts: Facts, found: setup.Setup | None, seconds: float | None) -> list[str]:
    c = "exp_manager.checkpoint_callback_params"
    if not facts.get("exp_manager.create_checkpoint_callback", True):
        return ["checkpoints: none (exp_manager.create_checkpoint_callback is False)"]
    every = facts.get(f"{c}.every_n_train_steps")
    when = f"every {every:,} steps" if every else "by time" if facts.get(f"{c}.train_time_interval") else "after a validation"
    if every and seconds:
        when += f" (about {duration(every * seconds)})"
    keep = facts.get(f"{c}.save_top_k", 3)
    kept = {-1: "all are kept", 0: "none is kept", 1: "the last one is kept"}.get(
        keep, f"the best {keep} by {facts.get(f'{c}.monitor', 'val_loss')} are kept"
    )
    if facts.get(f"{c}.monitor") in ("step", "global_step") and keep > 1:
        kept = f"the last {keep} are kept"
    weight = "" if found is None else f"about {units.size(memory.checkpoint_bytes(found))} each, "
    background = ", written in the background" if facts.get("exp_manager.async_checkpointing") else ""
    return ["checkpoints", *rows([("when", f"{when}, {weight}{kept}{background}"), ("where", _where(facts))])]


def _where(facts: Facts) -> str:
    said = facts.get("exp_manager.checkpoint_callback_params.dirpath")
    if said:
        return str(said)
    if facts.get("exp_manager.explicit_log_dir"):
        return os.path.join(str(facts.get("exp_manager.explicit_log_dir")), "checkpoints")
    base = facts.get("exp_manager.exp_dir") or "nemo_experiments"
    return os.path.join(str(base), str(facts.get("exp_manager.name") or "default"), "<version>", "checkpoints")


def unread_lines(unread: Sequence[tuple[str, str]]) -> list[str]:
    """The keys that nothing reads, by what they mean."""
    by_meaning: dict[str, list[str]] = {}
    for key, meaning in unread:
        by_meaning.setdefault(meaning, []).append(key)
    found = [f"keys without effect here ({len(unread)})"] if unread else []
    for meaning, keys in by_meaning.items():
        found += textwrap.wrap(
            f"{', '.join(keys)}: {meaning}", WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False
        )
    return found
