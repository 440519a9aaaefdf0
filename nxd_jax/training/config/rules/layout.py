"""Whether the ranks can be laid out as `distributed_strategy` says, on this machine."""

from __future__ import annotations

from nxd_jax.training import launching
from nxd_jax.training.config.facts import SIZES, Facts
from nxd_jax.training.config.problems import Problems

TP = "distributed_strategy.tensor_model_parallel_size"
PP = "distributed_strategy.pipeline_model_parallel_size"
CP = "distributed_strategy.context_parallel_size"
EP = "distributed_strategy.expert_model_parallel_size"


def check(facts: Facts, problems: Problems) -> None:
    _machine(facts, problems)
    _ranks(facts, problems)
    _pipeline(facts, problems)
    _context(facts, problems)
    _sequence(facts, problems)
    if facts.size("kv") > 1 and facts.hf and not facts.mixtral and not facts.get("model.qkv_linear", False):
        problems.warn(
            "distributed_strategy.kv_replicator",
            f"{facts.size('kv')} needs model.qkv_linear: True in the original; here K/V heads are copied without it, too",
        )


def _machine(facts: Facts, problems: Problems) -> None:
    devices = facts.devices
    if devices is None:
        if facts.get("trainer.devices") not in ("auto", -1):
            problems.error("trainer.devices", f"{facts.get('trainer.devices')!r} must be a number of cores on each node")
        return
    if devices not in launching.MACHINES and devices not in (1, 2, 8):
        machines = ", ".join(f"{count} ({name})" for count, (name, _) in launching.MACHINES.items())
        problems.warn("trainer.devices", f"{devices}: no machine has so many cores; there are {machines}, and 1, 2 and 8 for tests")
    if facts.get("trainer.lnc") == 2 and devices <= 32:
        problems.warn("trainer.lnc", f"2 is of trn2.48xlarge, which then has 64 cores; trainer.devices is {devices}")


def _ranks(facts: Facts, problems: Problems) -> None:
    world = facts.world
    if world is None:
        return
    said = ", ".join(f"{name} {facts.size(name)}" for name in ("tp", "pp", "cp"))
    if world % facts.shared:
        key = max((TP, PP, CP), key=lambda k: facts.size({TP: "tp", PP: "pp", CP: "cp"}[k]))
        problems.error(
            key,
            f"trainer.devices * num_nodes = {facts.devices} * {facts.nodes} = {world} ranks cannot be shared out to {said}: they must be a multiple of "
            f"{facts.shared}",
        )
    elif (world // (facts.size("tp") * facts.size("pp"))) % facts.size("ep"):
        problems.error(
            EP,
            f"{facts.size('ep')} must divide the {world // (facts.size('tp') * facts.size('pp'))} ranks that tp and pp leave: they hold the experts",
        )
    else:
        _hardware(facts, problems)


def _hardware(facts: Facts, problems: Problems) -> None:
    """What the real machine would not like."""
    topology = facts.topology()
    if topology is None or facts.devices not in launching.MACHINES:
        return
    layout = {name: facts.size(name) for name in ("tp", "pp", "cp", "ep")}
    for sentence in topology.check(**layout, layout="nxd"):
        key = next((key for kind, key in ((" cp ", CP), (" pp ", PP), (" ep ", EP)) if kind in sentence), TP)
        problems.warn(key, f"on {topology.instance.name}: {sentence}")


def _pipeline(facts: Facts, problems: Problems) -> None:
    pp, vpp = facts.size("pp"), facts.size("vpp")
    if vpp > 1 and pp == 1:
        problems.error("distributed_strategy.virtual_pipeline_model_parallel_size", f"{vpp} needs {SIZES['pp']} above 1")
    elif vpp > 1 and facts.microbatches is not None and facts.microbatches % pp:
        problems.error(
            "distributed_strategy.virtual_pipeline_model_parallel_size",
            f"{vpp}: the interleaved schedule takes micro-batches in groups of {SIZES['pp']}={pp}, and a step has {facts.microbatches}",
        )
    if facts.layers and pp * vpp > facts.layers:
        problems.error(PP, f"{pp} stages{f' times {vpp}' if vpp > 1 else ''} for {facts.layers} layers: a stage has at least one")
    elif facts.megatron and facts.layers and facts.layers % (pp * vpp):
        problems.error(PP, f"model.num_layers={facts.layers} must be a multiple of {pp * vpp} stages")
    if facts.has("model.pipeline_cuts") and facts.get("model.pipeline_cuts"):
        _cuts(facts, problems, list(facts.get("model.pipeline_cuts")))


def _cuts(facts: Facts, problems: Problems, cuts: list[str]) -> None:
    key, stages = "model.pipeline_cuts", facts.size("pp") * facts.size("vpp")
    if stages == 1:
        problems.warn(key, f"nothing is cut: {SIZES['pp']} is 1")
        return
    if len(cuts) != stages - 1:
        problems.error(key, f"{len(cuts)} cuts for {stages} stages: there must be {stages - 1}")
    names = [str(c).rpartition(".") for c in cuts]
    wrong = [
        str(c) for c, (head, _, number) in zip(cuts, names, strict=True) if not number.isdigit() or head not in ("model.layers", "layers")
    ]
    if wrong:
        problems.error(key, f"{', '.join(wrong[:3])}: a cut is named model.layers.N, N being the last layer of a stage")
        return
    numbers = [int(number) for _, _, number in names]
    if facts.layers and max(numbers) > facts.layers - 2:
        problems.error(key, f"model.layers.{max(numbers)} leaves nothing behind it: there are layers 0 to {facts.layers - 1}")
    if numbers != sorted(set(numbers)):
        problems.error(key, f"the layers of cuts must increase, and are {', '.join(map(str, numbers))}")


def _context(facts: Facts, problems: Problems) -> None:
    cp, ring = facts.size("cp"), bool(facts.loose("model.fusions.ring_attention"))
    flash = bool(facts.get("model.fusions.flash_attention"))
    if ring and flash:
        problems.error("model.fusions.ring_attention", "True together with model.fusions.flash_attention: True; set one of them to False")
    elif cp > 1 and not ring:
        problems.error(
            CP, f"{cp} needs model.fusions.ring_attention: True (and flash_attention: False): a rank has a part of each sequence"
        )
    elif ring and cp == 1:
        problems.warn("model.fusions.ring_attention", "True has nothing to do: context_parallel_size is 1")
    if cp > 1 and facts.seq % cp:
        problems.error("model.encoder_seq_length", f"{facts.seq} must be a multiple of context_parallel_size={cp}")
    if cp > 1 and facts.megatron:
        problems.error(CP, f"{cp}: Megatron models are not for context parallelism; set it to 1")
    elif cp > 1 and facts.mixtral:
        problems.warn(CP, f"{cp}: the original has no context parallelism for Mixtral")


def _sequence(facts: Facts, problems: Problems) -> None:
    key, tp = "distributed_strategy.sequence_parallel", facts.size("tp")
    if not facts.get(key, False):
        return
    if tp == 1:
        problems.warn(key, f"True has nothing to do: {SIZES['tp']} is 1")
    length = facts.seq // facts.size("cp")
    if facts.seq and length % tp:
        of = "" if facts.size("cp") == 1 else f" / context_parallel_size = {length}"
        problems.error(
            "model.encoder_seq_length", f"{facts.seq}{of} must be a multiple of {SIZES['tp']}={tp}, among which sequence_parallel cuts it"
        )
