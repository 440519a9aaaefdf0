"""Fine-tuning: rows of prompt and answer as token ids, of which those of the answer are learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nxd_jax import _progress
from nxd_jax.training.data import tokenizing
from nxd_jax.training.data.alignment import bad_rows, chats, texts
from nxd_jax.training.data.alignment.texts import Row

SOURCE, TARGET, MESSAGES = "input", "output", "messages"
"""Columns of rows: a prompt and its answer, or a conversation."""

TEXTS = 1000
"""Rows that are tokenised together."""


@dataclass(frozen=True)
class Examples:
    """Token ids of rows of different lengths.

    ids: int32, all rows one behind the other. learned: bool, for each id. ends: int64, where each row ends. source: the set, as errors name it.
    """

    ids: np.ndarray
    learned: np.ndarray
    ends: np.ndarray
    source: str

    def __len__(self) -> int:
        return len(self.ends)

    def bounds(self, row: int) -> tuple[int, int]:
        """Where a row begins and ends in `ids`."""
        return int(self.ends[row - 1]) if row else 0, int(self.ends[row])

    def lengths(self) -> np.ndarray:
        """Of all rows."""
        return np.diff(self.ends, prepend=0)


@dataclass(frozen=True)
class Rules:
    """How rows become ids. length: most of a row. bad, long: `data.bad_rows` and `data.long_rows`. template: for conversations, and with `chat` also for
    rows of input and output. key: how the tokenizer is called in errors."""

    tokenizer: Any
    length: int
    bad: str | None = None
    long: str | None = None
    chat: bool = False
    template: str | None = None
    key: str = "data.tokenizer.type"


def tokenize(rows: Sequence[Row], rules: Rules, source: str) -> Examples:
    """begin of text + input + output + end of text, without special tokens in between; output and end are learned. A conversation is as its template says.

    A tokenizer without a begin of text adds none. Raises ValueError for a tokenizer without an end of text, columns that are missing, rows without an answer,
    and rows of more than `length` tokens, unless `rules` leave them out.
    """
    tokenizing.end_of_text(rules.tokenizer, rules.key)
    conversations = MESSAGES in rows[0]
    if not conversations:
        texts.columns(rows, (SOURCE, TARGET), source, f", or {MESSAGES!r} (conversations)")
    template = chats.Template(rules.tokenizer, rules.template, rules.key) if conversations or rules.chat else None
    bad = bad_rows.unusable(source, rules.bad)
    long = bad_rows.too_long(source, rules.long, rules.length)
    ids: list[np.ndarray] = []
    learned: list[np.ndarray] = []
    for number, found, marks in _ids(rows, rules, template, bad, source):
        if len(found) > rules.length:
            if rules.long != "cut":
                long.add(number, f"{len(found)} tokens")
                continue
            found, marks = found[: rules.length], marks[: rules.length]
            if not marks.any():
                long.add(number, f"{len(found)} tokens of prompt before the answer")
                continue
        ids.append(found)
        learned.append(marks)
    bad.finish(len(rows))
    long.finish(len(rows))
    ends = np.cumsum([len(x) for x in ids], dtype=np.int64)
    none = np.zeros(0)
    return Examples(np.concatenate([none, *ids]).astype(np.int32), np.concatenate([none, *learned]).astype(bool), ends, source)


def _ids(
    rows: Sequence[Row], rules: Rules, template: chats.Template | None, bad: bad_rows.BadRows, source: str
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    begin, end = rules.tokenizer.bos_token_id, rules.tokenizer.eos_token_id
    for first in _progress.bar(range(0, len(rows), TEXTS), f"tokenizing {source}", 2):
        pieces = bad.usable(range(first, min(first + TEXTS, len(rows))), lambda number: _pieces(rows[number], template))
        runs = iter(tokenizing.encode(rules.tokenizer, [text for own in pieces.values() for text, _ in own], special=False))
        for number, own in pieces.items():
            found = [(next(runs), mark) for _, mark in own]
            if template is None:
                found = [([] if begin is None else [begin], False), *found, ([end], True)]
            yield (
                number,
                np.concatenate([np.asarray(run, np.int32) for run, _ in found]),
                np.concatenate([np.full(len(run), mark) for run, mark in found]),
            )


def _pieces(row: Row, template: chats.Template | None) -> list[chats.Piece]:
    if MESSAGES in row and template is not None:
        return template.pieces(row[MESSAGES])
    prompt, answer = row.get(SOURCE), row.get(TARGET)
    for name, text in ((SOURCE, prompt), (TARGET, answer)):
        if not isinstance(text, str):
            raise bad_rows.NoAnswerError(f"{name} is {text!r}, not text")
    if not str(answer).strip():
        raise bad_rows.NoAnswerError(f"{TARGET} is empty")
    if template is not None:
        return template.pieces([{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}])
    return [(str(prompt), False), (str(answer), True)]
