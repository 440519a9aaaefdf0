"""`nxdt-train --check`: all that can be said of a configuration before anything runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from nxd_jax.training.config import effects, loading, positions, rules, schedule, summary, trainable
from nxd_jax.training.config.facts import Facts
from nxd_jax.training.config.positions import Positions
from nxd_jax.training.config.problems import Problems
from nxd_jax.training.config.report import Report
from nxd_jax.training.config.values import resolved
from nxd_jax.training.config.walk import Walk, nearest

__all__ = ["check", "check_file", "facts_of"]


def check(cfg: DictConfig, source: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> Report:
    """The report on a configuration. source: the file it is from, for lines and columns; overrides: the `key=value` words that changed it."""
    where = positions.read(source) if source is not None else Positions()
    return _report(cfg, Problems(_name(source), where, overrides), where)


def check_file(file: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Report:
    """The report on a file with overrides; what cannot be read as YAML, keys that stand twice and overrides that Hydra refuses are among its errors.

    Raises loading.ConfigError for a file that is not there.
    """
    path = Path(file).expanduser()
    if not path.is_file() or path.suffix not in (".yaml", ".yml"):
        loading.load(path)  # says what is wrong
    where = positions.read(path)
    problems = Problems(path.name, where, overrides)
    if where.error is not None:
        problems.add_at("error", "", where.error[0], where.error[1])
        return Report(path.name, tuple(problems.of("error")))
    with tempfile.TemporaryDirectory() as folder:
        if where.clean is not None:
            path = Path(folder) / path.name
            path.write_text(where.clean, encoding="utf-8")
        cfg = _load(path, overrides, problems)
    if cfg is None:
        return Report(problems.file, tuple(problems.of("error")))
    return _report(cfg, problems, where)


def facts_of(cfg: DictConfig) -> Facts:
    """The numbers of a configuration, with those of config.json if it can be read."""
    values = resolved(cfg, Problems("", Positions()))
    found = Facts(values, custom=trainable.is_custom(values))
    rules.files.check(found, Problems("", Positions()))
    return found


def _name(source: str | os.PathLike[str] | None) -> str:
    return "configuration" if source is None else Path(source).name


def _load(path: Path, overrides: Sequence[str], problems: Problems) -> Any:
    """The configuration with all overrides that Hydra takes; None if it takes the file itself not."""
    try:
        return loading.load(path, overrides)
    except loading.ConfigError as error:
        if not overrides:
            problems.add_at("error", "", _said(error), None)
            return None
    taken = []
    for word in overrides:
        try:
            loading.load(path, [word])
            taken.append(word)
        except loading.ConfigError as error:
            problems.error(word.partition("=")[0].lstrip("+~"), _refused(word, error))
    try:
        return loading.load(path, taken)
    except loading.ConfigError as error:
        problems.add_at("error", "", _said(error), None)
        return None


def _refused(word: str, error: Exception) -> str:
    """Why Hydra does not take a word."""
    key = word.partition("=")[0].lstrip("+~")
    if word.startswith(("+", "~")) or "Could not override" not in str(error):
        return _said(error)
    near = nearest(key)
    return "is not in the file" + (f"; did you mean {near}?" if near not in ("", key) else "") + f" (+{word} adds it)"


def _said(error: Exception) -> str:
    """Without the file's path, which a report says itself, in one line."""
    text = str(error)
    head, _, tail = text.partition(".yaml: ")
    return " ".join((tail if tail and "\n" not in head else text).split())


def _report(cfg: DictConfig, problems: Problems, where: Positions) -> Report:
    for key, place, first in where.doubles:
        problems.add_at("error", key, f"stands twice, first in line {first.line}: take one of them out", place)
    values = resolved(cfg, problems)
    custom = trainable.is_custom(values)
    walk = Walk(values, problems, values.get("model_source"), custom).go()
    facts = Facts(values, walk.bad, custom=custom)
    _source(facts, problems)
    rules.check_all(facts, problems)
    not_trained = trainable.why_not(values) or ""
    return Report(
        problems.file,
        tuple(problems.of("error")),
        tuple(problems.of("warning")),
        tuple(problems.of("note")),
        not_trained,
        lambda: [*summary.lines(facts), "", *summary.unread_lines([*walk.unread, *effects.without_effect(facts)])],
        schedule.of(facts),
    )


def _source(facts: Facts, problems: Problems) -> None:
    if not facts.custom and facts.source not in ("hf", "megatron", None):
        problems.error("model_source", f"{facts.source!r} must be hf or megatron, or a name that nxd_jax.training.registry.register knows")
