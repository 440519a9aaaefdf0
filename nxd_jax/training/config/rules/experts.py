"""`model.moe`."""

from __future__ import annotations

from nxd_jax.training.config.facts import Facts
from nxd_jax.training.config.problems import Problems
from nxd_jax.training.config.rules.layout import EP

CAPACITY = "model.moe.capacity_factor"


def check(facts: Facts, problems: Problems) -> None:
    ep = facts.size("ep")
    if not facts.get("model.moe"):
        if ep > 1:
            problems.error(EP, f"{ep} needs a model with experts (model.moe)")
        return
    if facts.hf and not facts.mixtral:
        problems.error(
            "model.moe",
            f"name={facts.get('name')!r} chooses the llama model, which has no experts: a name with mixtral in it chooses the one that has",
        )
    if facts.experts % ep:
        problems.error(EP, f"{ep} must divide the {facts.experts} experts")
    if facts.experts and facts.top_k > facts.experts:
        problems.error("model.moe.top_k", f"{facts.top_k} of {facts.experts} experts: at most all of them")
    if facts.top_k == 1 and facts.get("model.moe.normalize_top_k_affinities"):
        problems.error(
            "model.moe.normalize_top_k_affinities",
            "True with top_k: 1: the only expert of a token would always have the weight 1; set it to False",
        )
    if facts.get("model.moe.routing_algorithm") == "sinkhorn":
        _sinkhorn(facts, problems)
    _capacity(facts, problems)
    _gated(facts, problems)
    _group(facts, problems)


def _sinkhorn(facts: Facts, problems: Problems) -> None:
    key = "model.moe.routing_algorithm"
    if facts.hf:
        problems.error(key, "sinkhorn: Hugging Face's Mixtral chooses by top_k")
    elif facts.top_k != 1:
        problems.error(key, f"sinkhorn needs model.moe.top_k: 1, which is {facts.top_k}")


def _capacity(facts: Facts, problems: Problems) -> None:
    said, dropless = facts.get(CAPACITY), bool(facts.get("model.moe.dropless", False))
    if dropless:
        if said is not None and float(said) > 0:
            problems.warn(CAPACITY, f"{said} has no effect with dropless: True: experts take all tokens that are sent to them")
        _dropless(facts, problems)
    elif not facts.has(CAPACITY):
        problems.warn(
            CAPACITY, "is not given, and 1.0: tokens beyond equal shares are dropped (the original stops); null or dropless: True keep all"
        )
    elif said is not None and float(said) <= 0:
        problems.error(CAPACITY, f"{said} must be above 0, or model.moe.dropless: True says that no token is dropped")
    elif said is not None and facts.experts and float(said) * facts.top_k < facts.top_k and facts.experts > 1:
        problems.warn(CAPACITY, f"{said} is below 1: some tokens are dropped even where all experts get equally many")


def _gated(facts: Facts, problems: Problems) -> None:
    if facts.hf and not facts.get("model.moe.glu_mlp", True):
        problems.error("model.moe.glu_mlp", "False: Hugging Face's Mixtral has gated experts")


def _dropless(facts: Facts, problems: Problems) -> None:
    act = str(facts.get("model.activation", "gelu")) if facts.megatron else str((facts.json or {}).get("hidden_act", "silu"))
    allowed = ("silu", "swiglu") if facts.megatron else ("silu",)
    if act not in allowed:
        problems.error("model.moe.dropless", f"True needs the activation {' or '.join(allowed)}, which is {act}")
    if facts.megatron and not facts.get("model.moe.glu_mlp", True):
        problems.error("model.moe.dropless", "True needs model.moe.glu_mlp: True")


def _group(facts: Facts, problems: Problems) -> None:
    key, dp = "distributed_strategy.token_shuffle_group_size", facts.dp
    size = facts.get(key, 1)
    if size > 1 and dp and dp % size:
        problems.error(key, f"{size} must divide the {dp} data-parallel ranks")
