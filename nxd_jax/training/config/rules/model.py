"""The model's sizes against the ranks, and what `model` says against config.json."""

from __future__ import annotations

import difflib

from nxd_jax.tensor_parallel import kv_groups
from nxd_jax.training.config.facts import Facts
from nxd_jax.training.config.keys.model import FROM_JSON, RECOMPUTE
from nxd_jax.training.config.problems import Problems
from nxd_jax.training.config.rules.layout import TP


def check(facts: Facts, problems: Problems) -> None:
    _class(facts, problems)
    _sizes(facts, problems)
    _heads(facts, problems)
    _length(facts, problems)
    _recompute(facts, problems)
    if facts.hf:
        _from_json(facts, problems)


def _class(facts: Facts, problems: Problems) -> None:
    """`name` chooses the class of the model; config.json is of one."""
    kind = str((facts.json or {}).get("model_type") or "")
    if not facts.hf or not kind or kind == facts.kind:
        return
    if kind == "mixtral":
        problems.error(
            "name", f"{facts.get('name')!r} chooses the llama model, and model.model_config is of mixtral: give a name with mixtral in it"
        )
    elif kind in ("llama", "mistral"):
        problems.warn(
            "model.model_config", f"is of model_type {kind}, and is read as a {facts.kind} model, which name={facts.get('name')!r} chooses"
        )
    else:
        problems.error("model.model_config", f"is of model_type {kind}, and must be of llama, mistral or mixtral")


def _sizes(facts: Facts, problems: Problems) -> None:
    for name in ("num_layers", "hidden_size", "rope_theta"):
        if (given := facts.get(f"model.{name}")) is not None and float(given) <= 0 and given != -1:
            problems.error(f"model.{name}", f"{given} must be above 0" + (", or -1 for config.json's" if facts.hf else ""))
    tp = facts.size("tp")
    source = "model" if facts.megatron else "config.json"
    if facts.hidden and facts.heads and not (facts.json or {}).get("head_dim") and facts.hidden % facts.heads:
        problems.error("model.hidden_size", f"{facts.hidden} must be a multiple of {facts.heads} attention heads ({source})")
    for name, size in (("vocab_size", facts.vocabulary), ("intermediate_size", int((facts.json or {}).get("intermediate_size") or 0))):
        if facts.hf and size % tp:
            problems.error(TP, f"{tp} must divide {name}={size} of config.json")
    if facts.megatron and facts.get("model.ffn_hidden_size", 0) % tp:
        problems.error(
            "model.ffn_hidden_size", f"{facts.get('model.ffn_hidden_size')} must be a multiple of tensor_model_parallel_size={tp}"
        )


def _heads(facts: Facts, problems: Problems) -> None:
    tp, heads, kv, copies = facts.size("tp"), facts.heads, facts.kv_heads, facts.size("kv")
    if not heads or not kv:
        return
    if heads % tp:
        problems.error(TP, f"{tp} must divide {heads} attention heads: at most {_divisor(heads, tp)} of the ranks below it")
        return
    if heads % kv:
        problems.error(
            "model.num_kv_heads" if facts.megatron else "model.model_config",
            f"{heads} attention heads must be a multiple of {kv} K/V heads",
        )
        return
    if facts.megatron:
        if kv % tp:
            problems.error(
                "model.num_kv_heads",
                f"{kv} must be a multiple of tensor_model_parallel_size={tp}: Megatron models hold no copies of K/V heads",
            )
        return
    fit = kv_groups.fitting_copies(heads, kv, tp)
    key = "distributed_strategy.kv_replicator"
    if copies in fit:
        return
    if not fit or copies != 1:
        allowed = f"must be {' or '.join(map(str, fit))}" if fit else "cannot be right; change tensor_model_parallel_size"
        problems.error(
            key,
            f"{copies} with {kv} K/V heads, {heads} heads and tensor_model_parallel_size={tp} {allowed}: kv_replicator * K/V heads is a multiple of tp",
        )
    else:
        problems.warn(
            key,
            f"{kv} K/V heads are too few for tensor_model_parallel_size={tp}: each is held {fit[0]} times (kv_replicator: {fit[0]}; the original stops)",
        )


def _divisor(heads: int, tp: int) -> int:
    return max(n for n in range(1, tp + 1) if heads % n == 0)


def _length(facts: Facts, problems: Problems) -> None:
    most = facts.model_size("max_position_embeddings", "max_position_embeddings")
    if not facts.seq or not most or facts.seq <= most:
        return
    key = "model.max_position_embeddings" if facts.has("model.max_position_embeddings") else "model.encoder_seq_length"
    text = f"sequences have model.encoder_seq_length={facts.seq} tokens, and the model max_position_embeddings={most}"
    if facts.megatron and facts.get("model.position_embedding_type", "learned_absolute") == "learned_absolute":
        problems.error(key, f"{text}, each learned: it must be {facts.seq} at least")
    else:
        problems.warn(key, f"{text}: it was not made for positions above")


def _recompute(facts: Facts, problems: Problems) -> None:
    key = "model.activations_checkpoint_recompute"
    said, granularity = facts.get(key, []), facts.get("model.activations_checkpoint_granularity")
    if facts.custom:
        return
    names, known = [said] if isinstance(said, str) else said, RECOMPUTE[facts.kind]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1, cutoff=0.4)
            problems.error(
                key, f"{name!r} is no part of {facts.kind} models: use {', '.join(known)}" + (f" (did you mean {near[0]}?)" if near else "")
            )
    if names and granularity is None:
        problems.warn(key, "nothing is computed again: activations_checkpoint_granularity is null, and must be selective for this list")
    elif names and granularity == "full":
        problems.warn(key, "is not used: activations_checkpoint_granularity is full, which computes every layer again")
    elif granularity == "selective" and not names:
        problems.note(
            "model.activations_checkpoint_granularity",
            "selective without activations_checkpoint_recompute: CoreAttention is computed again",
        )
    if "MoE" in names and facts.capacity_factor is None:
        problems.note(key, "MoE without a capacity: tokens are sent to experts again in the backward pass")


def _from_json(facts: Facts, problems: Problems) -> None:
    """Sizes that people give in `model`, and that count in config.json alone."""
    section = facts.get("model", {})
    for name, in_json in FROM_JSON.items():
        if not isinstance(section, dict) or section.get(name) is None:
            continue
        there = (facts.json or {}).get(in_json)
        if there == section[name]:
            problems.note(f"model.{name}", f"counts in config.json only, which says the same: {in_json}={there}")
        else:
            problems.error(
                f"model.{name}",
                f"{section[name]} counts in config.json only, which says {in_json}={there}: change it there, or take it out here",
            )
