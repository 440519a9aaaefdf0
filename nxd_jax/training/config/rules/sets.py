"""The sets that `data` names, by their first rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nxd_jax.training.config.facts import Facts
from nxd_jax.training.config.problems import Problems
from nxd_jax.training.config.rules.files import paths

ROWS = 4
"""Rows of each set that are looked at."""


def check(facts: Facts, problems: Problems) -> None:
    if not facts.hf or facts.get("model_alignment_strategy"):
        return
    for key in ("data.train_dir", "data.val_dir", "data.test_dir"):
        found = [path for path in paths(facts, key) if path.exists()]
        counts = [_look(facts, problems, key, path) for path in found]
        if key == "data.train_dir" and found and all(c is not None for c in counts):
            facts.rows = sum(c for c in counts if c is not None)
            _enough(facts, problems, key)


def _enough(facts: Facts, problems: Problems, key: str) -> None:
    rows = facts.rows or 0
    if facts.gbs and rows < facts.gbs:
        problems.error(key, f"has {rows} rows, and a step needs data.global_batch_size={facts.gbs}: give more rows, or a smaller batch")


def _look(facts: Facts, problems: Problems, key: str, path: Path) -> int | None:
    """Check the first rows; how many rows there are, None if that takes reading."""
    rows, count, columns = first_rows(path)
    if columns is not None and "input_ids" not in columns:
        if not facts.get("data.tokenizer"):
            problems.error(
                key,
                f"{path} has the columns {', '.join(columns) or '(none)'}, and not input_ids: `nxdt-data` makes a set of text, or name data.tokenizer",
            )
        return count
    for number, row in enumerate(rows):
        if _row(facts, problems, key, f"row {number} of {path}", row):
            break
    return count


def first_rows(path: Path) -> tuple[list[dict[str, Any]], int | None, list[str] | None]:
    """(rows, how many there are, columns) of a folder of `save_to_disk`, or a file of JSON lines; nothing of others."""
    if path.is_dir() and (path / "state.json").is_file():
        import datasets

        found = datasets.load_from_disk(str(path))
        return [dict(row) for row in found.select(range(min(ROWS, len(found))))], len(found), list(found.column_names)
    if path.is_file() and path.suffix == ".jsonl":
        rows = []
        with path.open(encoding="utf-8") as lines:
            for _, line in zip(range(ROWS), lines, strict=False):
                try:
                    rows.append(dict(json.loads(line)))
                except (ValueError, TypeError):
                    return [], None, None  # the data module says which line it is
        return rows, None, list(rows[0]) if rows else None
    return [], None, None


def _row(facts: Facts, problems: Problems, key: str, where: str, row: dict[str, Any]) -> bool:
    """Whether something is wrong with a row."""
    ids = row.get("input_ids")
    if not isinstance(ids, list):
        return False
    if facts.seq and len(ids) != facts.seq:
        problems.error(
            key,
            f"{where} has {len(ids)} tokens, and model.encoder_seq_length is {facts.seq}: make a set of that width, or set it to {len(ids)}",
        )
        return True
    if facts.vocabulary and ids and (max(ids) >= facts.vocabulary or min(ids) < 0):
        wrong = max(ids) if min(ids) >= 0 else min(ids)
        problems.error(
            key,
            f"{where} has the token id {wrong}, and vocab_size of config.json is {facts.vocabulary}: it is of another tokenizer",
        )
        return True
    return False
