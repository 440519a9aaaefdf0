"""What `nxdt-data check` and `show` say of Megatron sets."""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nxd_jax.training.batch_sizes import BatchSizes
from nxd_jax.training.data.checking import Report
from nxd_jax.training.data.megatron.index_maps import Wanted
from nxd_jax.training.data.megatron.indexed import IndexedSet, index_path
from nxd_jax.training.data.megatron.splits import split
from nxd_jax.training.data.showing import WIDTH


def prefix_of(path: str) -> str | None:
    """The prefix of a Megatron set that a path means, with or without .bin or .idx; None for anything else."""
    plain = path[:-4] if path.endswith((".bin", ".idx")) else path
    return plain if index_path(plain).is_file() or os.path.isfile(f"{plain}.bin") else None


@dataclass
class Ids:
    """Of all tokens. highest_at: where it is first; seen: whether each id is there; ends: how many documents end with which id."""

    lowest: int | None = None
    highest: int | None = None
    seen: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    highest_at: int = 0
    ends: dict[int, int] = field(default_factory=dict)


def check(prefix: str, tokenizer: Any = None, cfg: Any = None, name: str = "") -> Report:
    """Read a whole set. tokenizer: one of `tokenizers.load`; cfg: the configuration that is to train on it, and name how it is called.

    Raises FileNotFoundError and ValueError for files that are not there or damaged.
    """
    found = IndexedSet(prefix)
    report = Report()
    ids = _look(found)
    _describe(found, ids, report)
    if tokenizer is not None and ids.highest is not None:
        _judge_vocabulary(found, ids, tokenizer, report)
    if cfg is not None:
        _judge_config(found, cfg, name, report)
    return report


def show(prefix: str, row: int = 0, count: int = 1, tokenizer: Any = None) -> str:
    """Documents `row` and on, as ids and with a tokenizer as text. Raises ValueError for one that is not there."""
    found = IndexedSet(prefix)
    if not 0 <= row < len(found):
        raise ValueError(f"there is no document {row}: there are {len(found):,}, from 0 on")
    return "\n\n".join(_document(found, number, tokenizer) for number in range(row, min(row + count, len(found))))


def _document(found: IndexedSet, number: int, tokenizer: Any) -> str:
    ids = found[number].tolist()
    lines = [
        f"document {number}: {len(ids)} ids",
        textwrap.fill(" ".join(map(str, ids)), WIDTH, initial_indent="  ", subsequent_indent="  "),
    ]
    if tokenizer is not None:
        lines += ["text", textwrap.indent(tokenizer.ids_to_text(ids), "  ")]
    return "\n".join(lines)


def _look(found: IndexedSet) -> Ids:
    ids = Ids()
    before = 0
    for block in found.blocks():
        high, low = int(block.max()), int(block.min())
        if ids.highest is None or high > ids.highest:
            ids.highest, ids.highest_at = high, before + int(block.argmax())
        ids.lowest = low if ids.lowest is None else min(ids.lowest, low)
        if low >= 0 and np.issubdtype(block.dtype, np.integer):
            ids.seen = np.pad(ids.seen, (0, max(high + 1 - len(ids.seen), 0)))
            ids.seen[block] = True
        before += len(block)
    full = np.flatnonzero(found.sizes)
    last = found.pointers[full] // found.dtype.itemsize + found.sizes[full] - 1
    values, counts = np.unique(found.stream[last], return_counts=True)
    ids.ends = dict(zip(values.tolist(), counts.tolist(), strict=True))
    return ids


def _describe(found: IndexedSet, ids: Ids, report: Report) -> None:
    sizes = found.sizes
    report.lines.append(f"{found.prefix}: {len(found):,} documents, {found.tokens:,} tokens ({found.dtype.name})")
    if not found.tokens:
        report.problems.append("there are no tokens")
        return
    empty = int((sizes == 0).sum())
    report.lines.append(
        f"  lengths         {sizes.min():,} to {sizes.max():,} tokens, {float(np.mean(sizes)):.6g} in the mean"
        + (f"; {empty:,} are empty" if empty else "")
    )
    report.lines.append(f"  ids             {ids.lowest} to {ids.highest}, {int(ids.seen.sum()):,} different ones")
    end, count = max(ids.ends.items(), key=lambda pair: pair[1])
    report.lines.append(f"  ends            {count:,} of {len(found) - empty:,} documents end with the id {end}")
    if len(found.documents) - 1 != len(found):
        report.lines.append(
            f"  note            {len(found):,} sequences make {len(found.documents) - 1:,} documents; each sequence counts as a document, as in the original"
        )
    if not np.issubdtype(found.dtype, np.integer):
        report.problems.append(f"it holds {found.dtype.name} numbers, and token ids are whole numbers")
    elif ids.lowest is not None and ids.lowest < 0:
        report.problems.append(f"there is the id {ids.lowest}: ids are 0 or more")


def _judge_vocabulary(found: IndexedSet, ids: Ids, tokenizer: Any, report: Report) -> None:
    assert ids.highest is not None
    if ids.highest >= tokenizer.vocab_size:
        starts = found.pointers // found.dtype.itemsize
        number = int(np.searchsorted(starts, ids.highest_at, "right")) - 1
        report.problems.append(
            f"document {number} has the id {ids.highest}, and the tokenizer has {tokenizer.vocab_size} tokens: ids must be below it. It is a set of another one"
        )
    else:
        report.lines.append(f"  vocabulary      the tokenizer has {tokenizer.vocab_size:,} tokens")
    there = ids.ends.get(tokenizer.eos_id, 0)
    report.lines.append(
        f"  end of text     {there:,} documents end with that of the tokenizer ({tokenizer.eos_id}); --append-eod puts it there"
    )


def _judge_config(found: IndexedSet, cfg: Any, name: str, report: Report) -> None:
    """What a configuration makes of it alone, for training."""
    report.lines.append(f"with {name}")
    data, devices = cfg.data, cfg.trainer.get("devices")
    if not isinstance(devices, int):
        report.lines.append(f"  trainer.devices={devices}: how many samples there are depends on the machine")
        return
    try:
        sizes = BatchSizes.of(cfg, devices * int(cfg.trainer.get("num_nodes") or 1))
        bounds = [0, len(found)] if data.get("splits_string") is None else split(data.splits_string, len(found))
        wanted = Wanted(
            found.sizes,
            0,
            bounds[1],
            max(int(cfg.trainer.get("max_steps") or 0), 0) * sizes.global_batch_size,
            int(data.seq_length),
            int(cfg.get("seed") or 0),
            0 if data.get("no_seqlen_plus_one_input_tokens") else 1,
        )
    except ValueError as error:
        report.problems.append(str(error))
        return
    length = wanted.seq_length
    once = (wanted.tokens - wanted.extra) // length
    report.lines.append(f"  for training    documents 0 to {bounds[1] - 1:,}: {wanted.tokens:,} tokens, {once:,} samples of {length}")
    report.lines.append(f"  a step          {sizes.global_batch_size:,} samples, {sizes.global_batch_size * length:,} tokens")
    report.lines.append(
        f"  the training    {wanted.samples:,} samples, {wanted.samples * length / wanted.tokens:.3g} epochs of this set alone"
    )
