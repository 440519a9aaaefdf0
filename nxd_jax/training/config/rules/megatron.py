"""What the original refuses for Megatron models."""

from __future__ import annotations

from nxd_jax.training.config.facts import Facts
from nxd_jax.training.config.keys.model import REJECTED
from nxd_jax.training.config.problems import Problems


def check(facts: Facts, problems: Problems) -> None:
    section = facts.get("model", {})
    for name, (passes, why) in REJECTED.items():
        if isinstance(section, dict) and name in section and not facts.custom:
            if section[name] not in passes:
                problems.error(f"model.{name}", f"{section[name]} is refused: {why}; take it out")
            else:
                problems.note(f"model.{name}", "nothing reads it")
    if not facts.megatron:
        return
    if not facts.zero1:
        problems.error("distributed_strategy.zero1", "False: Megatron models train with ZeRO-1 only")
    for key in ("model.fusions.flash_attention", "model.fusions.ring_attention"):
        if facts.get(key):
            problems.error(key, "True: Megatron models have no blockwise attention; set it to False")
    if facts.get("model.share_embeddings_and_output_weights", True) and facts.size("pp") > 1:
        problems.error(
            "model.share_embeddings_and_output_weights",
            "True: with a pipeline the embedding and the head are on different stages; set it to False",
        )
    _model(facts, problems)
    if facts.experts:
        _experts(facts, problems)
    _data(facts, problems)


def _model(facts: Facts, problems: Problems) -> None:
    part, rope = float(facts.get("model.rotary_percentage", 1.0)), facts.get("model.position_embedding_type") == "rope"
    if rope and facts.heads:
        head = int(facts.get("model.kv_channels") or facts.hidden // facts.heads)
        if not 0 < part <= 1 or int(head * part) % 2:
            problems.error(
                "model.rotary_percentage", f"{part:g} must be above 0, at most 1, and turn an even number of each head's {head} values"
            )
    if rope and facts.get("data.reset_position_ids"):
        problems.warn("data.reset_position_ids", "True has no effect: positions are rotary, and attention goes on across documents")
    if facts.get("model.transformer_block_type") == "normformer" and facts.size("tp") > 1:
        problems.error(
            "model.transformer_block_type",
            f"normformer normalizes over the MLP's whole width, which tensor_model_parallel_size={facts.size('tp')} ranks share out; take pre_ln",
        )
    if facts.get("model.fp16_lm_cross_entropy"):
        problems.error("model.fp16_lm_cross_entropy", "True is not supported: the loss is computed in float32; take it out")


def _experts(facts: Facts, problems: Problems) -> None:
    """What experts do not go with."""
    for key, default, needed in (
        ("model.activation", "gelu", "swiglu"),
        ("model.has_bias", True, False),
        ("model.transformer_block_type", "pre_ln", "pre_ln"),
    ):
        if facts.get(key, default) != needed:
            problems.error(key, f"{facts.get(key, default)} must be {needed}: the layers have experts (model.moe)")
    if facts.get("model.moe.dropout"):
        problems.error("model.moe.dropout", f"{facts.get('model.moe.dropout')} must be 0: experts of Megatron models have no dropout")
    frequency = int(facts.get("model.moe.frequency", 1))
    if facts.layers and frequency > facts.layers:
        problems.error("model.moe.frequency", f"{frequency}: every how manieth of {facts.layers} layers has experts; none would")
    if not facts.get("model.moe.dropless") and not facts.get("model.moe.glu_mlp", True):
        problems.error("model.moe.glu_mlp", "False: the experts of Megatron models are gated; leave it True")


def _data(facts: Facts, problems: Problems) -> None:
    if facts.get("model_alignment_strategy"):
        return
    for key in ("data_prefix", "data_impl", "splits_string", "seq_length"):
        if not facts.has(f"data.{key}"):
            also = (
                " (data.train_dir is read with model_alignment_strategy only)"
                if key == "data_prefix" and facts.has("data.train_dir")
                else ""
            )
            problems.error(f"data.{key}", f"is missing: Megatron's data module reads it{also}")
    if facts.get("data.reset_attention_mask"):
        problems.error("data.reset_attention_mask", "True: attention masks that begin anew after a document are not supported")
    if facts.get("data.fine_tuning"):
        problems.error("data.fine_tuning", "True is not supported; model_alignment_strategy.sft is what fine-tunes")
    if facts.get("data.seq_length") not in (None, facts.seq):
        problems.error("data.seq_length", f"{facts.get('data.seq_length')} must be model.encoder_seq_length={facts.seq}")
