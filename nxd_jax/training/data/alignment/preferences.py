"""DPO and ORPO: a prompt with a chosen and a rejected answer, as token ids by trl's rules.

A prompt and its answer are tokenised together, and split where the prompt alone ends. If the tokens on both sides of that place merge, the last token of the
prompt belongs to the answer. (trl 0.10.1 loses it.)
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from nxd_jax import _progress
from nxd_jax.training.data import tokenizing
from nxd_jax.training.data.alignment import bad_rows, chats, texts
from nxd_jax.training.data.alignment.examples import TEXTS
from nxd_jax.training.data.alignment.packing import PAD
from nxd_jax.training.data.alignment.texts import Row
from nxd_jax.training.data.rows import IGNORED

logger = logging.getLogger("nxd_jax")

PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"
"""Columns of rows: text, or lists of messages."""
ROW = "row"
"""The column with a row's number."""

MODES = ("keep_start", "keep_end")
"""Which tokens of a prompt that is too long are kept."""


@dataclass(frozen=True)
class Rules:
    """How rows become ids.

    length: most tokens of a prompt with an answer; a longer one has its prompt cut to `max_prompt_length` by `truncation_mode`, then the answer to the rest.
    bad: `data.bad_rows`. template: for conversations. key: how the tokenizer is called in errors.
    """

    tokenizer: Any
    length: int
    max_prompt_length: int = 2048
    truncation_mode: str = "keep_start"
    bad: str | None = None
    template: str | None = None
    key: str = "data.tokenizer.type"

    def __post_init__(self) -> None:
        if self.truncation_mode not in MODES:
            raise ValueError(f"truncation_mode: {self.truncation_mode!r} must be {' or '.join(MODES)}")

    def cut_prompt(self, prompt: list[int], longest: int) -> list[int]:
        """A prompt before answers of up to `longest` tokens: at most `max_prompt_length` tokens of it, where both are more than `length`."""
        most = self.max_prompt_length
        if len(prompt) + longest <= self.length or len(prompt) <= most:
            return prompt
        return prompt[:most] if self.truncation_mode == "keep_start" else prompt[-most:]


class Side(NamedTuple):
    """A prompt and an answer of it, as ids."""

    prompt: list[int]
    answer: list[int]


class Pair(NamedTuple):
    """A row: int32 arrays of ids. prompt: what both sides have of it."""

    prompt: np.ndarray
    chosen_prompt: np.ndarray
    chosen: np.ndarray
    rejected_prompt: np.ndarray
    rejected: np.ndarray


class PreferenceRows(Dataset[dict[str, torch.Tensor]]):
    """Rows of chosen_input_ids, chosen_attention_mask, chosen_labels (-100 on the prompt), the same for rejected, and prompt_input_ids and
    prompt_attention_mask: int64 [length], filled at the end, prompts at the front.

    And `row`, an int64 scalar: `first` plus its number here, by which reference values are looked up.
    """

    def __init__(self, pairs: Sequence[Pair], length: int, source: str, first: int = 0):
        self.pairs = pairs
        self.length = length
        self.source = source
        self.first = first

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        pair = self.pairs[index]
        row: dict[str, torch.Tensor] = {}
        for name, prompt, answer in ((CHOSEN, pair.chosen_prompt, pair.chosen), (REJECTED, pair.rejected_prompt, pair.rejected)):
            ids = np.concatenate([prompt, answer])
            row[f"{name}_input_ids"] = self._filled(ids, PAD)
            row[f"{name}_attention_mask"] = self._filled(np.ones_like(ids), 0)
            row[f"{name}_labels"] = self._filled(np.concatenate([np.full_like(prompt, IGNORED), answer]), IGNORED)
        row[f"{PROMPT}_input_ids"] = self._filled(pair.prompt, PAD, front=True)
        row[f"{PROMPT}_attention_mask"] = self._filled(np.ones_like(pair.prompt), 0, front=True)
        row[ROW] = torch.tensor(self.first + index)
        return row

    def _filled(self, values: np.ndarray, fill: int, front: bool = False) -> torch.Tensor:
        found = torch.full((self.length,), fill)
        begin = self.length - len(values) if front else 0
        found[begin : begin + len(values)] = torch.from_numpy(values.astype(np.int64))
        return found

    def fingerprint(self) -> int:
        """A number that differs where the ids of the rows do."""
        found = 0
        for pair in self.pairs:
            for part in pair:
                found = zlib.crc32(part.tobytes(), zlib.crc32(len(part).to_bytes(8, "little"), found))
        return found


def tokenize(rows: Sequence[Row], rules: Rules, source: str) -> PreferenceRows:
    """Rows with the columns prompt, chosen and rejected.

    Raises ValueError for a tokenizer without an end of text, columns that are missing, and rows without a preference, unless `rules` leave them out.
    """
    tokenizing.end_of_text(rules.tokenizer, rules.key)
    texts.columns(rows, (PROMPT, CHOSEN, REJECTED), source)
    bad = bad_rows.unusable(source, rules.bad)
    template = chats.Template(rules.tokenizer, rules.template, rules.key) if isinstance(rows[0][PROMPT], list) else None
    cut = _Cuts(rules)
    pairs = list(_pairs(rows, rules, template, bad, cut, source))
    bad.finish(len(rows))
    cut.say(source)
    return PreferenceRows(pairs, rules.length, source)


class _Cuts:
    """Cuts what is longer than a sequence, and counts."""

    def __init__(self, rules: Rules):
        self.rules = rules
        self.prompts = self.answers = 0

    def __call__(self, side: Side, longest: int) -> Side:
        """Within `length`, if the prompt with the longer answer is not: the prompt first."""
        rules, answer = self.rules, side.answer
        prompt = rules.cut_prompt(side.prompt, longest)
        self.prompts += len(prompt) < len(side.prompt)
        if len(prompt) + longest > rules.length:
            room = rules.length - rules.max_prompt_length
            if room < 1:
                raise bad_rows.NoAnswerError(
                    f"{len(prompt)} tokens of prompt and {longest} of answer are more than data.seq_length={rules.length}, and max_prompt_length="
                    f"{rules.max_prompt_length} leaves no room for an answer; set it below data.seq_length"
                )
            self.answers += len(answer) > room
            answer = answer[:room]
        return Side(prompt, answer)

    def say(self, source: str) -> None:
        """Warn of what was cut."""
        if self.prompts or self.answers:
            logger.warning(
                "%s: %d prompts were cut to max_prompt_length=%d (%s), %d answers to the rest of data.seq_length=%d, without their end of text",
                source,
                self.prompts,
                self.rules.max_prompt_length,
                self.rules.truncation_mode,
                self.answers,
                self.rules.length,
            )


def _pairs(
    rows: Sequence[Row], rules: Rules, template: chats.Template | None, bad: bad_rows.BadRows, cut: _Cuts, source: str
) -> Iterator[Pair]:
    for first in _progress.bar(range(0, len(rows), TEXTS), f"tokenizing {source}", 2):
        there = bad.usable(range(first, min(first + TEXTS, len(rows))), lambda number: _texts(rows[number], template))
        yield from _tokenized(there, rules, bad, cut)


def _tokenized(there: Mapping[int, tuple[str, str, str]], rules: Rules, bad: bad_rows.BadRows, cut: _Cuts) -> Iterable[Pair]:
    """Prompts, and prompts with an answer, tokenised together. there: prompt, chosen and rejected by the numbers of rows."""
    wanted = [text for prompt, chosen, rejected in there.values() for text in (prompt, prompt + chosen, prompt + rejected)]
    runs = iter(tokenizing.encode(rules.tokenizer, wanted, special=False))
    return bad.usable(there, lambda _: _split(next(runs), next(runs), next(runs), rules, cut)).values()


def _texts(row: Row, template: chats.Template | None) -> tuple[str, str, str]:
    found: list[Any] = [row.get(name) for name in (PROMPT, CHOSEN, REJECTED)]
    if template is not None:
        for messages in found:
            chats.check_messages(messages)
        (prompt, chosen), (_, rejected) = (template.answer(found[0], answer) for answer in found[1:])
        found = [prompt, chosen, rejected]
    for name, text in zip((PROMPT, CHOSEN, REJECTED), found, strict=True):
        if not isinstance(text, str):
            raise bad_rows.NoAnswerError(f"{name} is {text!r}, not text")
        if name != PROMPT and not text.strip():
            raise bad_rows.NoAnswerError(f"{name} is empty")
    prompt, chosen, rejected = found
    if chosen == rejected:
        raise bad_rows.NoAnswerError("chosen and rejected are the same")
    return prompt, chosen, rejected


def _split(prompt: list[int], chosen: list[int], rejected: list[int], rules: Rules, cut: _Cuts) -> Pair:
    sides = [_side(prompt, full, rules) for full in (chosen, rejected)]
    first, second = (side.prompt for side in sides)
    if sum(a != b for a, b in zip(first, second, strict=False)) > 1 or abs(len(first) - len(second)) > 1:
        raise bad_rows.NoAnswerError("the prompt has other tokens before the chosen answer than before the rejected one")
    longest = max(len(side.answer) for side in sides)
    common = tokenizing.begun(rules.tokenizer, prompt)[: min(len(first), len(second))]
    parts = [part for side in sides for part in cut(side, longest)]
    return Pair(*(np.asarray(part, np.int32) for part in (rules.cut_prompt(common, longest), *parts)))


def _side(prompt: list[int], full: list[int], rules: Rules) -> Side:
    end = rules.tokenizer.eos_token_id
    size = len(prompt) if full[: len(prompt)] == prompt else max(len(prompt) - 1, 0)
    answer = full[size:]
    if not answer:
        raise bad_rows.NoAnswerError("an answer has no tokens of its own")
    return Side(tokenizing.begun(rules.tokenizer, full[:size]), answer if answer[-1] == end else [*answer, end])
