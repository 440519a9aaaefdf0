"""`model_alignment_strategy`: SFT, DPO, ORPO, LoRA."""

from __future__ import annotations

from nxd_jax.training.config.facts import Facts
from nxd_jax.training.config.keys.data import LORA_TARGETS
from nxd_jax.training.config.problems import Problems
from nxd_jax.training.config.rules.files import paths
from nxd_jax.training.config.rules.sets import first_rows

S = "model_alignment_strategy"


def check(facts: Facts, problems: Problems) -> None:
    if facts.has("data.alignment_strategy"):
        problems.error("data.alignment_strategy", f"was moved: {S} at the top of the file is its place")
    if facts.loose("peft"):
        _lora(facts, problems)
    if not facts.get(S):
        _stale(facts, problems)
        return
    kinds = [k for k in ("sft", "dpo", "orpo") if facts.has(f"{S}.{k}")]
    if len(kinds) > 1:
        problems.error(f"{S}.{kinds[1]}", f"there are {' and '.join(kinds)}; a training does one of them")
    if {"dpo", "orpo"} & set(kinds):
        for size, key in (("pp", "pipeline_model_parallel_size"), ("cp", "context_parallel_size")):
            if facts.size(size) > 1:
                problems.error(f"{S}.{kinds[0]}", f"{kinds[0]} needs {key}: 1, which is {facts.size(size)}")
    if (beta := facts.get(f"{S}.dpo.kl_beta")) is not None and float(beta) <= 0:
        problems.error(f"{S}.dpo.kl_beta", f"{beta} must be above 0: with 0 nothing is learned, and below it the rejected answer")
    if (beta := facts.get(f"{S}.orpo.beta")) is not None and float(beta) < 0:
        problems.error(f"{S}.orpo.beta", f"{beta} must not be negative: the rejected answer would be learned")
    if facts.get(f"{S}.sft.separate_documents"):
        _documents(facts, problems)
    for key in ("train_dir", "seq_length", "tokenizer.type"):
        if not facts.get(f"data.{key}"):
            problems.error(f"data.{key}", f"is missing: {S} needs it")
    if len(kinds) == 1:
        _columns(facts, problems, kinds[0])
    length = facts.get("data.seq_length")
    if length and facts.seq and length != facts.seq:
        problems.error(
            "data.seq_length",
            f"{length}: rows have so many tokens, and the model takes model.encoder_seq_length={facts.seq}: they must be equal"
            " (the original stops in the first step)",
        )


def _documents(facts: Facts, problems: Problems) -> None:
    key = f"{S}.sft.separate_documents"
    if not facts.get(f"{S}.sft.packing"):
        problems.warn(key, "has no effect without packing: each row is one document")
    elif facts.size("cp") > 1:
        problems.error(key, f"True with context_parallel_size: {facts.size('cp')}: ring attention is causal only; set one of them back")
    elif facts.get("model.fusions.flash_attention"):
        problems.note(key, "attention is computed without fusions.flash_attention, which is causal only")


def _columns(facts: Facts, problems: Problems, kind: str) -> None:
    """The columns of the first row of each file of JSON lines."""
    wanted = ("input", "output") if kind == "sft" else ("prompt", "chosen", "rejected")
    for key in ("data.train_dir", "data.val_dir"):
        for path in paths(facts, key):
            _, _, found = first_rows(path)
            if found is not None and not ({*wanted} <= {*found} or (kind == "sft" and "messages" in found)):
                instead = ", or messages" if kind == "sft" else ""
                problems.error(key, f"{path} has the columns {', '.join(found)}, and {kind} needs {', '.join(wanted)}{instead}")


def _lora(facts: Facts, problems: Problems) -> None:
    where = f"{S}.peft" if facts.has(f"{S}.peft") else "peft"
    if facts.zero1:
        problems.error("distributed_strategy.zero1", f"must be False with LoRA ({where})")
    if facts.precision != "autocast":
        problems.error("precision.type", f"{facts.get('precision.type')} must be autocast with LoRA ({where})")
    for name, good, words in (
        ("lora_alpha", lambda x: float(x) > 0, "above 0: adapters are multiplied by it"),
        ("lora_dropout", lambda x: float(x) < 1, "below 1"),
        ("target_modules", bool, "some of " + ", ".join(LORA_TARGETS)),
    ):
        if (value := facts.loose(f"{S}.peft.{name}")) is not None and not good(value):
            problems.error(f"{where}.{name}", f"{value} must be {words}")
    if facts.loose(f"{S}.peft.merge_lora") and not facts.loose(f"{S}.peft.save_lora_base"):
        problems.error(
            f"{where}.merge_lora", "True with save_lora_base: False saves nothing: adapters are merged into the model, which is not saved"
        )
    names = facts.loose("target_modules", [])
    for name in names if isinstance(names, list) else []:
        if name not in LORA_TARGETS:
            problems.error(f"{where}.target_modules", f"{name!r} must be one of {', '.join(LORA_TARGETS)}")


def _stale(facts: Facts, problems: Problems) -> None:
    """Keys of an older form of alignment, without the section that they need now."""
    for key in ("packing", "use_sft_style_data_module", "dev_choose_samples"):
        if facts.get(f"data.{key}"):
            problems.warn(f"data.{key}", f"is of fine-tuning, and there is no {S}: add it (sft: {{packing: True}}), or take this out")
            return
