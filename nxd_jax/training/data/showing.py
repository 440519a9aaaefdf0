"""What `nxdt-data show` prints: rows of a set, as ids and as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

from nxd_jax.training.data import records
from nxd_jax.training.data.making import COLUMNS
from nxd_jax.training.data.rows import IGNORED

WIDTH = 120


def show(paths: Iterable[str], row: int = 0, count: int = 1, tokenizer: Any = None) -> str:
    """Rows `row` and on of a set. Raises ValueError for a row that is not there."""
    number, found = 0, []
    for place in records.files(list(paths)):
        for table in records.tables(place):
            begin, end = max(row - number, 0), min(row + count - number, table.num_rows)
            found += [_row(number + begin + k, one, tokenizer) for k, one in enumerate(table.slice(begin, max(end - begin, 0)).to_pylist())]
            number += table.num_rows
            if number >= row + count and row >= 0:
                return "\n\n".join(found)
    if not found:
        raise ValueError(f"there is no row {row}: there are {number:,} rows, from 0 on")
    return "\n\n".join(found)


def _row(number: int, row: dict[str, Any], tokenizer: Any) -> str:
    ids = row.get(COLUMNS[0])
    if ids is None:
        return f"row {number}\n" + "\n".join(_wrapped(f"{name}: {value}") for name, value in row.items())
    lines = [f"row {number}: {len(ids)} ids", _wrapped(" ".join(map(str, ids)))]
    if tokenizer is not None:
        known = [i for i in ids if 0 <= i < len(tokenizer)]
        lines += ["text", textwrap.indent(tokenizer.decode(known), "  ")]
    if row.get("labels") is not None:
        labels = row["labels"]
        ignored = sum(label == IGNORED for label in labels)
        lines.append(
            "labels: as input_ids"
            if labels == ids
            else f"labels: {ignored} of {len(labels)} are {IGNORED}\n" + _wrapped(" ".join(map(str, labels)))
        )
    if row.get("attention_mask") is not None:
        lines.append(f"attention_mask: {sum(row['attention_mask'])} of {len(row['attention_mask'])} are 1")
    lines += [_wrapped(f"{name}: {value}") for name, value in row.items() if name not in COLUMNS]
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ")
