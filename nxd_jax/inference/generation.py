"""Texts of a language model, token by token: prompts take lines of the KV cache as they become free, and are decoded together."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from nxd_jax.inference import token_ids
from nxd_jax.inference.language_model import CacheFullError, LanguageModel
from nxd_jax.inference.speculation import Draft
from nxd_jax.training.evaluation.generation import Choosing

_Prompt = tuple[Sequence[int], str | None]
"""Token ids, and the name of an adapter."""


class Made(NamedTuple):
    """A token that was made. prompt: the number of the prompt that it answers. last: the answer ends with it; token is None if the text ended before it."""

    prompt: int
    token: int | None
    last: bool


@dataclasses.dataclass
class _Row:
    """A text in a line of the cache. token: the last one, which is not in the cache yet; position: its place. left: tokens that may follow."""

    prompt: int
    token: int
    position: int
    left: int


def generate(
    model: LanguageModel, prompts: Sequence[Sequence[int]], max_new_tokens: int | None = None, **options: object
) -> list[list[int]]:
    """The answers to prompts of token ids. Arguments and errors are those of `stream`; tokens that end a text are left out."""
    rows = token_ids.prompts(prompts)
    found: list[list[int]] = [[] for _ in rows]
    for made in stream(model, rows, max_new_tokens, **options):  # type: ignore[arg-type]
        if made.token is not None:
            found[made.prompt].append(made.token)
    return found


def stream(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | None = None,
    end: int | Sequence[int] | None = None,
    choosing: Choosing | None = None,
    seed: int = 42,
    draft: LanguageModel | None = None,
    adapters: Sequence[str | None] | None = None,
) -> Iterator[Made]:
    """Tokens as they are made, of any number of prompts; as many as the cache has lines are decoded together.

    prompts: token ids, as lists, NumPy arrays or tensors on any device.
    max_new_tokens: of an answer; default: until the cache is full. end: tokens that end a text; default the model's. choosing: of a token by logits on the
    CPU, default the likeliest; draws follow `seed` (those of on_device_sampling torch's own seed). draft: a small model that guesses what `model` then checks,
    speculation_length tokens at once; the answers are those without it. adapters: the LoRA adapters of the prompts, by name, None for the model as it is
    (default all).

    A model makes the texts of one stream at a time: while it makes others, the first token raises RuntimeError. Before that raises CacheFullError for prompts
    that do not fit, or not with max_new_tokens, and ValueError for what `LanguageModel.prefill` refuses, for max_new_tokens below 1, and for what does not go
    with on_device_sampling or a draft, and for adapters that are not loaded; TypeError for prompts that are no token ids, such as texts.
    """
    prompts = token_ids.prompts(prompts)
    _check(model, prompts, max_new_tokens, choosing)
    named = [None] * len(prompts) if adapters is None else list(adapters)
    model.check_adapters(named, len(prompts))
    ends = model.about.end if end is None else token_ids.ends(end)
    guess = None if draft is None else Draft(model, draft, choosing)
    return _streamed(_Stepping(model, guess, choosing or Choosing(), seed), list(zip(prompts, named, strict=True)), max_new_tokens, ends)


def _check(model: LanguageModel, prompts: Sequence[Sequence[int]], most: int | None, choosing: Choosing | None) -> None:
    if choosing is not None and not callable(choosing):
        raise TypeError(f"choosing must be a Choosing of nxd_jax.training.evaluation.generation, got {type(choosing).__name__}")
    if most is not None and most < 1:
        raise ValueError(f"max_new_tokens={most} must be at least 1")
    if model.options.on_device_sampling and choosing is not None:
        raise ValueError("the model chooses tokens itself (on_device_sampling): leave choosing out, or trace it without")
    for number, prompt in enumerate(prompts):
        model.check_prompt(prompt, f"prompt {number}")
        if len(prompt) + (most or 1) > model.options.seq_len:
            raise CacheFullError(
                f"prompt {number} has {len(prompt)} tokens; with max_new_tokens={most or 1} that is more than the KV cache holds, {model.options.seq_len} "
                "(seq_len): trace the model for more, or ask for fewer"
            )


class _Stepping:
    """What follows rows: one token each, or with a draft several."""

    def __init__(self, model: LanguageModel, draft: Draft | None, choosing: Choosing, seed: int):
        self.model, self.draft, self._choosing = model, draft, choosing
        self._source = torch.Generator().manual_seed(seed)

    @property
    def models(self) -> list[LanguageModel]:
        """The model and its draft."""
        return [self.model] if self.draft is None else [self.model, self.draft.model]

    def begin(self, taken: Sequence[_Prompt], lines: Sequence[int]) -> list[int]:
        """The first token of each answer."""
        prompts, adapters = [ids for ids, _ in taken], [name for _, name in taken]
        if self.draft is not None:
            self.draft.model.prefill(prompts, lines, adapters if self.draft.model is self.model else None)
        return self._chosen(self.model.prefill(prompts, lines, adapters))

    def go_on(self, rows: dict[int, _Row]) -> dict[int, list[int]]:
        """The next tokens of each line."""
        size = self.model.options.batch_size
        tokens = [rows[k].token if k in rows else 0 for k in range(size)]
        positions = [rows[k].position if k in rows else 0 for k in range(size)]
        if self.draft is not None:
            return self.draft.go_on(tokens, positions, list(rows))
        found = self._chosen(self.model.decode(tokens, positions, list(rows)))
        return {line: [found[line]] for line in rows}

    def _chosen(self, found: torch.Tensor) -> list[int]:
        chosen: list[int] = (found if self.model.options.on_device_sampling else self._choosing(found, self._source)).tolist()
        return chosen


def _streamed(stepping: _Stepping, prompts: Sequence[_Prompt], most: int | None, ends: Sequence[int]) -> Iterator[Made]:
    with contextlib.ExitStack() as busy:
        for model in {id(m): m for m in stepping.models}.values():
            busy.enter_context(model.busy())
        yield from _all(stepping, prompts, most, ends)


def _all(stepping: _Stepping, prompts: Sequence[_Prompt], most: int | None, ends: Sequence[int]) -> Iterator[Made]:
    options = stepping.model.options
    waiting, rows = deque(enumerate(prompts)), dict[int, _Row]()
    while waiting or rows:
        free = [line for line in range(options.batch_size) if line not in rows] if waiting else []
        taken = [waiting.popleft() for _ in range(min(len(free), len(waiting), options.prompts_at_once))]
        if taken:
            lines = free[: len(taken)]
            for line, (number, (prompt, _)), token in zip(lines, taken, stepping.begin([p for _, p in taken], lines), strict=True):
                rows[line] = _Row(number, token, len(prompt) - 1, options.seq_len - len(prompt) if most is None else most)
                yield from _said(rows, line, [token], ends)
            continue
        for line, tokens in stepping.go_on(rows).items():
            yield from _said(rows, line, tokens, ends)


def _said(rows: dict[int, _Row], line: int, tokens: Sequence[int], ends: Sequence[int]) -> Iterator[Made]:
    """Add tokens to a row, up to its end, which frees the line."""
    row = rows[line]
    for token in tokens:
        if token in ends:
            del rows[line]
            yield Made(row.prompt, None, True)
            return
        row.token, row.position, row.left = token, row.position + 1, row.left - 1
        if not row.left:
            del rows[line]
        yield Made(row.prompt, token, not row.left)
        if not row.left:
            return
