"""What `nxdt-data check` says of a set: all that does not fit at once, and what a configuration makes of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from omegaconf import DictConfig

from nxd_jax.training.batch_sizes import BatchSizes
from nxd_jax.training.data import records, sets
from nxd_jax.training.data.making import COLUMNS
from nxd_jax.training.data.rows import IGNORED


@dataclass
class Report:
    """Lines about a set, and its problems."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        found = [f"problem: {text}" for text in self.problems] or ["no problems"]
        return "\n".join([*self.lines, *found])


@dataclass
class Found:
    """What was counted in the rows of a set."""

    rows: int = 0
    tokens: int = 0
    widths: dict[int, int] = field(default_factory=dict)
    first_of_width: dict[int, int] = field(default_factory=dict)
    """The first row of each width."""
    types: dict[str, str] = field(default_factory=dict)
    lowest: int | None = None
    highest: int | None = None
    largest_row: int = 0
    lowest_row: int = 0
    seen: set[int] = field(default_factory=set)
    labels: int = 0
    labels_equal: int = 0
    labels_shifted: int = 0
    labels_ignored: int = 0
    bad_label: tuple[int, int] | None = None
    zeros: int = 0
    bad_mask: tuple[int, int] | None = None
    uneven: list[str] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Of most rows."""
        return max(self.widths, key=lambda w: self.widths[w], default=0)


def check(
    paths: Iterable[str], cfg: DictConfig | None = None, name: str = "", vocab_size: int | None = None, tokenizer: Any = None
) -> Report:
    """Look at every row of a set. cfg: the configuration that is to train on it, and name how it is called; vocab_size: its model's; tokenizer: the set's.

    Raises FileNotFoundError and ValueError for what cannot be read.
    """
    said = list(paths)
    found = look(said)
    report = Report()
    _describe(found, ", ".join(said), report)
    if found.rows:
        _judge(found, report)
    limit = vocab_size if vocab_size is not None else (len(tokenizer) if tokenizer is not None else None)
    if limit is not None and found.highest is not None:
        _judge_vocabulary(found, limit, "the model's vocab_size" if vocab_size is not None else "the tokenizer's size", report)
    if cfg is not None:
        _judge_config(found, cfg, name, report)
    return report


def look(paths: Iterable[str]) -> Found:
    """Count."""
    found = Found()
    for place in records.files(list(paths)):
        for table in _tables(place):
            if COLUMNS[0] not in table.column_names:
                raise ValueError(f"{place} has the columns {', '.join(table.column_names)}, and no input_ids. {sets.HOW}")
            _add(found, table)
    return found


def _tables(place: Path) -> Iterator[pa.Table]:
    with contextlib.suppress(records.NoRowsError):
        yield from records.tables(place)


def _add(found: Found, table: pa.Table) -> None:
    columns = {name: table.column(name).combine_chunks() for name in COLUMNS if name in table.column_names}
    found.types.update({name: str(table.schema.field(name).type) for name in table.column_names})
    for name, column in columns.items():
        if not pa.types.is_list(column.type) and not pa.types.is_large_list(column.type) and not pa.types.is_fixed_size_list(column.type):
            raise ValueError(f"column {name} holds {column.type}, and must hold lists of whole numbers")
    ids = _lists(columns[COLUMNS[0]])
    other = {name: _lists(columns[name]) for name in COLUMNS[1:] if name in columns}
    for k, row in enumerate(ids):
        number = found.rows + k
        found.widths[len(row)] = found.widths.get(len(row), 0) + 1
        found.first_of_width.setdefault(len(row), number)
        found.tokens += len(row)
        _add_ids(found, row, number)
        for name, rows in other.items():
            if len(rows[k]) != len(row):
                found.uneven.append(f"row {number} has {len(row)} input_ids and {len(rows[k])} numbers in {name}")
            elif name == "labels":
                _add_labels(found, row, rows[k], number)
            else:
                _add_mask(found, rows[k], number)
    found.rows += len(ids)


def _lists(column: Any) -> list[np.ndarray]:
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    flat = pc.fill_null(pc.list_flatten(column), -1).to_numpy(zero_copy_only=False)
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []


def _add_ids(found: Found, row: np.ndarray, number: int) -> None:
    if not len(row):
        return
    low, high = int(row.min()), int(row.max())
    if found.lowest is None or low < found.lowest:
        found.lowest, found.lowest_row = low, number
    if found.highest is None or high > found.highest:
        found.highest, found.largest_row = high, number
    found.seen.update(np.unique(row).tolist())


def _add_labels(found: Found, ids: np.ndarray, labels: np.ndarray, number: int) -> None:
    taken = labels != IGNORED
    found.labels += 1
    found.labels_ignored += int((~taken).sum())
    found.labels_equal += bool(np.array_equal(labels[taken], ids[taken]))
    both = taken[:-1]
    found.labels_shifted += bool(
        both.any() and np.array_equal(labels[:-1][both], ids[1:][both]) and not np.array_equal(labels[taken], ids[taken])
    )
    bad = labels[taken & (labels < 0)]
    if len(bad) and found.bad_label is None:
        found.bad_label = (number, int(bad[0]))


def _add_mask(found: Found, mask: np.ndarray, number: int) -> None:
    found.zeros += int((mask == 0).sum())
    bad = mask[(mask != 0) & (mask != 1)]
    if len(bad) and found.bad_mask is None:
        found.bad_mask = (number, int(bad[0]))


def _describe(found: Found, name: str, report: Report) -> None:
    report.lines.append(f"{name}: {found.rows:,} rows of {found.width} ids, {found.tokens:,} tokens")
    if not found.rows:
        report.problems.append("there are no rows")
        return
    report.lines.append("  columns         " + ", ".join(f"{n} ({kind})" for n, kind in found.types.items()))
    report.lines.append(f"  ids             {found.lowest} to {found.highest}, {len(found.seen):,} different ones")
    if "labels" in found.types:
        same = "as input_ids" if found.labels_equal == found.labels else f"as input_ids in {found.labels_equal:,} of {found.labels:,} rows"
        report.lines.append(f"  labels          {same}; {found.labels_ignored:,} are {IGNORED} (no loss)")
    if "attention_mask" in found.types:
        report.lines.append(f"  attention_mask  {f'{found.zeros:,} zeros' if found.zeros else 'ones'}")


def _judge(found: Found, report: Report) -> None:
    for width, row in found.first_of_width.items():
        if width != found.width:
            report.problems.append(
                f"{found.widths[width]:,} row(s) have {width} ids where most have {found.width}, row {row} first: all must be as wide"
            )
    if found.uneven:
        more = f" (and {len(found.uneven) - 1} more rows)" if len(found.uneven) > 1 else ""
        report.problems.append(f"{found.uneven[0]}{more}: the columns of a row must be as long")
    if found.lowest is not None and found.lowest < 0:
        report.problems.append(f"row {found.lowest_row} has the id {found.lowest}: ids are 0 or more")
    if found.bad_label:
        report.problems.append(f"row {found.bad_label[0]} has the label {found.bad_label[1]}: labels are ids, or {IGNORED} for no loss")
    if found.bad_mask:
        report.problems.append(f"row {found.bad_mask[0]} has {found.bad_mask[1]} in attention_mask: it holds 0 and 1")
    if found.labels and found.labels_shifted == found.labels:
        report.problems.append("labels are the ids of the next place: the model shifts them itself, so they must equal input_ids")
    strange = sorted(set(found.types) - set(COLUMNS))
    if strange:
        report.lines.append(f"  note            a training leaves out {', '.join(strange)}")
    if found.zeros:
        report.lines.append(f"  note            attention is causal whatever attention_mask says; give padding the label {IGNORED}")


def _judge_vocabulary(found: Found, limit: int, what: str, report: Report) -> None:
    assert found.highest is not None
    if found.highest >= limit:
        report.problems.append(
            f"row {found.largest_row} has the id {found.highest}, and {what} is {limit}: ids must be below it. Tokenise with the model's own tokenizer"
        )
    else:
        report.lines.append(f"  vocabulary      {what} is {limit}")


def _judge_config(found: Found, cfg: DictConfig, name: str, report: Report) -> None:
    """Whether a configuration can train on it, and for how long."""
    report.lines.append(f"with {name}")
    length = cfg.model.get("encoder_seq_length")
    if length is not None and found.rows and int(length) != found.width:
        report.problems.append(
            f"rows have {found.width} ids, and model.encoder_seq_length is {length}: set it to {found.width}, or make rows of {length}"
        )
    devices, nodes = cfg.trainer.get("devices"), int(cfg.trainer.get("num_nodes") or 1)
    if not isinstance(devices, int):
        report.lines.append(f"  trainer.devices={devices}: how many steps there are depends on the machine")
        return
    try:
        sizes = BatchSizes.of(cfg, devices * nodes)
    except ValueError as error:
        report.problems.append(str(error))
        return
    size = sizes.global_batch_size
    report.lines.append(
        f"  a step          {size:,} rows, {size * found.width:,} tokens: {sizes.dp_size} data-parallel ranks x {sizes.num_microbatches} micro-batches "
        f"of {sizes.micro_batch_size}"
    )
    steps = found.rows // size
    if not steps:
        report.problems.append(f"there are {found.rows:,} rows, and a step needs data.global_batch_size={size}")
        return
    report.lines.append(f"  an epoch        {steps:,} steps, {found.rows - steps * size:,} rows left out")
    total = int(cfg.trainer.get("max_steps") or -1)
    if total > 0:
        report.lines.append(
            f"  the training    trainer.max_steps={total:,}: {total / steps:.3g} epochs, {total * size * found.width:,} tokens"
        )
