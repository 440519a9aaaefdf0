"""Files and folders that a configuration names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nxd_jax.training.config.facts import Facts, read_json
from nxd_jax.training.config.problems import Problems

SIZES = ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
"""What a config.json has."""


def check(facts: Facts, problems: Problems) -> None:
    """Read config.json; say what is not there."""
    _model_config(facts, problems)
    if facts.hf:
        _data(facts, problems)
    _tokenizer(facts, problems)
    for key in ("exp_manager.resume_from_checkpoint", "trainer.resume_from_checkpoint"):
        path = facts.path(key)
        if path is not None and not path.exists():
            problems.error(key, f"there is no checkpoint {path}; {_hint(key, '/path/to/checkpoint')}, or null to start from random weights")
    for place in facts.get("exp_manager.files_to_copy", []):
        if not Path(os.path.expanduser(str(place))).exists():
            problems.error("exp_manager.files_to_copy", f"there is no file {place}")


def _model_config(facts: Facts, problems: Problems) -> None:
    path = facts.path("model.model_config")
    if path is None:
        if facts.hf and "model.model_config" not in facts.bad:
            problems.error("model.model_config", "must name a Hugging Face config.json with the model's sizes")
        return
    facts.json, wrong = read_json(path)
    if facts.json is None and not path.exists():
        facts.json = _downloaded(str(facts.get("model.model_config")))
    if facts.json is None:
        problems.error(
            "model.model_config",
            f"{wrong}. It is the config.json of a Hugging Face model, for its sizes; {_hint('model.model_config', '/path/to/config.json')}",
        )
    elif facts.hf and not any(name in facts.json for name in SIZES):
        problems.error("model.model_config", f"{path} has no sizes of a model, such as {', '.join(SIZES)}")


def _downloaded(name: str) -> dict[str, Any] | None:
    """The configuration of a model that transformers has downloaded before, by its name on the hub."""
    if name.startswith(("/", ".", "~", "$")) or name.endswith(".json"):
        return None
    from transformers import PretrainedConfig

    try:
        found, _ = PretrainedConfig.get_config_dict(name, local_files_only=True)
    except (OSError, ValueError):
        return None
    return dict(found) or None


def _data(facts: Facts, problems: Problems) -> None:
    if not facts.get("data.train_dir"):
        problems.error(
            "data.train_dir",
            "must name the set to train on: a folder of datasets' save_to_disk, or files with input_ids (nxdt-data makes one)",
        )
    for key in ("data.train_dir", "data.val_dir", "data.test_dir"):
        missing = [path for path in paths(facts, key) if not path.exists()]
        for path in missing[:3]:
            problems.error(key, f"there is no {path}; {_hint(key, '/path/to/set')} (nxdt-data makes a set of text)")


def paths(facts: Facts, key: str) -> Iterator[Path]:
    """The places of this machine that a key of `data` names."""
    said = facts.get(key, [])
    for one in [said] if isinstance(said, str) else said:
        if "://" not in str(one):
            yield Path(os.path.expandvars(os.path.expanduser(str(one))))


def _tokenizer(facts: Facts, problems: Problems) -> None:
    key = "data.tokenizer" if isinstance(facts.get("data.tokenizer"), str) else "data.tokenizer.type"
    said = facts.get(key)
    if isinstance(said, str) and said.startswith(("/", "./", "~", "$")):
        path = facts.path(key)
        if path is not None and not path.exists():
            problems.error(key, f"there is no tokenizer {path}; {_hint(key, '/path/to/tokenizer')}")
    for key in ("data.tokenizer.vocab_file", "data.tokenizer.merge_file", "data.tokenizer.model"):
        path = facts.path(key)
        if facts.megatron and path is not None and not path.exists():
            problems.error(key, f"there is no file {path}; {_hint(key, '/path/to/file')}")


def _hint(key: str, value: str) -> str:
    return f"override it with {key}={value}"
