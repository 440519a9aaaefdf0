"""Speculative decoding: a small model guesses tokens, the large one checks them in one call. Greedy, so the text is the large model's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nxd_jax.inference.language_model import LanguageModel
from nxd_jax.training.evaluation.generation import Choosing


def accepted(guessed: Sequence[int], right: Sequence[int]) -> list[int]:
    """The tokens that follow: guesses as long as they are what the model says, then its own. right: [len(guessed) + 1] what the model says after the
    last known token and after each guess."""
    count = next((k for k, (a, b) in enumerate(zip(guessed, right, strict=False)) if a != b), len(guessed))
    return list(right[: count + 1])


class Draft:
    """A draft model beside a target, with a cache of the same lines.

    Raises ValueError for a target without speculation_length, models of other vocabularies, lines or a draft with a shorter cache, and for choosing that
    draws; TypeError for a draft that is no `LanguageModel`.
    """

    def __init__(self, target: LanguageModel, model: LanguageModel, choosing: Choosing | None = None):
        if not isinstance(model, LanguageModel):
            raise TypeError(f"draft must be a LanguageModel, got {type(model).__name__}: LanguageModel.from_pretrained(folder, options)")
        self.target, self.model = target, model
        if not target.options.speculation_length:
            raise ValueError(
                "a draft needs a model that scores several tokens at once: trace it with InferenceConfig(speculation_length=4), say"
            )
        if choosing is not None and choosing.sample:
            raise ValueError("a draft goes with greedy decoding only: leave choosing out")
        for name, own, wanted in (
            ("batch_size", model.options.batch_size, target.options.batch_size),
            ("ctx_batch_size", model.options.prompts_at_once, target.options.prompts_at_once),
            ("vocabulary", model.about.vocabulary, target.about.vocabulary),
        ):
            if own != wanted:
                raise ValueError(f"the draft has {name} {own}, and the model {wanted}: they must be the same")
        if model.options.seq_len < target.options.seq_len or model.options.longest_prompt < target.options.longest_prompt:
            raise ValueError(
                f"the draft was traced for seq_len {model.options.seq_len} and prompts of {model.options.longest_prompt}, the model for "
                f"{target.options.seq_len} and {target.options.longest_prompt}: the draft needs as much"
            )
        if model.options.on_device_sampling and model.options.top_k > 1:
            raise ValueError(f"the draft draws tokens (on_device_sampling with top_k={model.options.top_k}): trace it with top_k=1")

    def go_on(self, tokens: list[int], positions: list[int], used: Sequence[int]) -> dict[int, list[int]]:
        """The next tokens of the lines in use: one at least. tokens, positions: the last token of every line, which no cache has yet."""
        count = self.target.options.speculation_length
        if max(positions[k] for k in used) + count > self.target.options.seq_len:  # too near the end to check as many
            self.model.decode(tokens, positions, used)
            found = _greedy(self.target.decode(tokens, positions, used), self.target)
            return {k: [int(found[k])] for k in used}
        guesses = [tokens]
        for step in range(count - 1):
            guesses.append(self._guess(guesses[-1], [p + step for p in positions], used))
        rows = [list(row) for row in zip(*guesses, strict=True)]
        right = _greedy(self.target.score(rows, positions, used), self.target).tolist()
        found_rows = {k: accepted(rows[k][1:], right[k]) for k in used}
        if any(len(row) == count for row in found_rows.values()):  # the draft has not read its last guess
            self.model.decode(guesses[-1], [p + count - 1 for p in positions], used)
        return found_rows

    def _guess(self, tokens: list[int], positions: list[int], used: Sequence[int]) -> list[int]:
        found: list[int] = _greedy(self.model.decode(tokens, positions, used), self.model).tolist()
        return found


def _greedy(found: torch.Tensor, model: LanguageModel) -> torch.Tensor:
    return found if model.options.on_device_sampling else found.argmax(-1)
