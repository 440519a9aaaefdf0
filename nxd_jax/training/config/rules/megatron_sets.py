"""The sets that `data.data_prefix` names, by their indexes and their first tokens."""

from __future__ import annotations

import os
from typing import Any

from nxd_jax.training.config.facts import Facts
from nxd_jax.training.config.problems import Problems

TOKENS = 1 << 16
"""Tokens of each set that are looked at."""

KEY, SPLITS = "data.data_prefix", "data.splits_string"


def check(facts: Facts, problems: Problems) -> None:
    """Whether they are there and whole, and give each use its documents."""
    if not facts.megatron or facts.get("model_alignment_strategy"):
        return
    _loading(facts, problems)
    tokenizer = _tokenizer(facts, problems)
    if not facts.get(KEY) or not facts.get("data.seq_length"):
        return
    if (uses := _uses(facts, problems)) is not None:
        _sets(facts, problems, uses, tokenizer)


def _loading(facts: Facts, problems: Problems) -> None:
    """Keys of the loader that do not go together."""
    cyclic = facts.get("data.dataloader_type") == "cyclic"
    if not facts.has("data.dataloader_type"):
        problems.error("data.dataloader_type", "is missing; it is single (in order) or cyclic (each data-parallel rank shuffles a part)")
    if cyclic and facts.get("data.drop_last") is False and facts.gbs > 1:
        problems.error("data.drop_last", "False is not for dataloader_type: cyclic; use single")
    if cyclic and facts.get("data.pad_samples_to_global_batch_size") and _validates(facts):
        problems.error("data.pad_samples_to_global_batch_size", "True is not for dataloader_type: cyclic; use single")


def _validates(facts: Facts) -> bool:
    return bool(facts.get("trainer.limit_val_batches", 1.0))


def _tokenizer(facts: Facts, problems: Problems) -> Any:
    """That of `data.tokenizer`, if it lies on this machine; None if it cannot be loaded."""
    from nxd_jax.training.data.megatron import tokenizers

    key, section = "data.tokenizer", facts.get("data.tokenizer")
    kind = section.get("type") if isinstance(section, dict) else section
    of_hub = (
        isinstance(kind, str)
        and (not isinstance(section, dict) or section.get("library") == "huggingface")
        and not os.path.exists(_filled(kind))
    )
    if section is None or of_hub:
        if section is None and key not in facts.bad:
            problems.error(key, "is missing: the size of the vocabulary and the end of documents come from it")
        return None
    try:
        found = tokenizers.load(section)
    except FileNotFoundError:
        return None  # the rule on files says so
    except ValueError as error:
        words = str(error).removeprefix("data.tokenizer")
        inner = words[1:].partition("=")[0].partition(" ")[0].rstrip(":") if words.startswith(".") else ""
        if isinstance(section, dict) and inner in section:
            problems.error(f"{key}.{inner}", words[len(inner) + 1 :].lstrip("=: "))
        else:
            problems.error(key, words.lstrip(": "))
        return None
    for name in ("eod_mask_loss", "reset_position_ids"):
        if facts.get(f"data.{name}") and found.eos_id is None:
            problems.error(f"data.{name}", "True needs a tokenizer with an end of text, and data.tokenizer has none")
    return found


def _filled(path: str) -> str:
    return os.path.expandvars(os.path.expanduser(path))


def _uses(facts: Facts, problems: Problems) -> dict[str, Any] | None:
    """Parts by use, or {"": parts} of a list that is split."""
    from nxd_jax.training.data.megatron import prefixes, splits

    said = facts.get(KEY)
    try:
        own = prefixes.by_use(said)
        if own is not None:
            return dict(own)
        found = {"": prefixes.parse(said)}
    except ValueError as error:
        problems.error(KEY, str(error).removeprefix(KEY).lstrip(": "))
        return None
    try:
        splits.split(str(facts.get(SPLITS, "")), 1)
    except ValueError as error:
        if facts.get(SPLITS) is not None:
            problems.error(SPLITS, str(error).removeprefix(f"{SPLITS}: "))
        return None
    return found


def _sets(facts: Facts, problems: Problems, uses: dict[str, Any], tokenizer: Any) -> None:
    validates = _validates(facts)
    for use, parts in uses.items():
        if use == "test" or (use == "valid" and not validates):
            continue  # training does not read them
        for prefix in parts.prefixes:
            found = _open(problems, prefix)
            if found is None:
                continue
            if tokenizer is not None:
                _ids(facts, problems, found, tokenizer)
            for name, first, last in _ranges(facts, use, len(found), validates):
                _documents(facts, problems, found, name, first, last, len(parts.prefixes) == 1)


def _open(problems: Problems, prefix: str) -> Any:
    from nxd_jax.training.data.megatron.indexed import IndexedSet

    try:
        return IndexedSet(prefix)
    except FileNotFoundError as error:
        problems.error(KEY, f"{error}; override it with {KEY}=[1.0,/path/to/PREFIX] (nxdt-data megatron makes a set of text)")
    except (OSError, ValueError) as error:
        problems.error(KEY, str(error))
    return None


def _ids(facts: Facts, problems: Problems, found: Any, tokenizer: Any) -> None:
    first = found.stream[:TOKENS]
    if len(first) and (int(first.max()) >= tokenizer.vocab_size or int(first.min()) < 0):
        wrong = int(first.max()) if int(first.min()) >= 0 else int(first.min())
        problems.error(
            KEY,
            f"{found.prefix} has the token id {wrong}, and data.tokenizer has {tokenizer.vocab_size} tokens: the set is of another tokenizer",
        )


def _ranges(facts: Facts, use: str, documents: int, validates: bool) -> list[tuple[str, int, int]]:
    """(use, first document, behind the last one) of training and, if there is some, validation."""
    from nxd_jax.training.data.megatron.splits import split

    if use:
        return [(use, 0, documents)]
    bounds = split(str(facts.get(SPLITS)), documents)
    return [("train", 0, bounds[1]), ("valid", bounds[1], bounds[2])][: 1 + validates]


def _documents(facts: Facts, problems: Problems, found: Any, use: str, first: int, last: int, alone: bool) -> None:
    """Whether a use has documents, and enough of them for what it reads."""
    key = KEY if isinstance(facts.get(KEY), dict) else SPLITS
    if last <= first:
        text = f"{facts.get(SPLITS)} leaves none of the {len(found):,} documents of {found.prefix} for"
        if use == "train":
            problems.error(key, f"{text} training")
        else:
            problems.warn(key, f"{text} validation: there is none")
        return
    tokens = int(found.sizes[first:last].sum(dtype="int64"))
    extra = 0 if facts.get("data.no_seqlen_plus_one_input_tokens") else 1
    samples = max(tokens - extra, 0) // int(facts.get("data.seq_length"))
    if not tokens:
        problems.error(KEY, f"documents {first} to {last - 1} of {found.prefix} ({use}) have no tokens")
    elif use == "train" and alone:
        facts.rows = samples
    elif use == "valid" and isinstance(facts.get("trainer.limit_val_batches", 1.0), float) and samples < facts.gbs and alone:
        problems.error(
            key,
            f"validation has {samples} samples of {found.prefix}, and a batch needs data.global_batch_size={facts.gbs}: give it more documents",
        )
