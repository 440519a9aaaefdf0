"""A language model on its devices: prompts in, tokens out, with the padding and the choice of programs that fixed shapes ask for."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from nxd_jax.inference import building
from nxd_jax.inference.buckets import fitting
from nxd_jax.inference.config import InferenceConfig
from nxd_jax.trace.nxd_model import NxDModel


class CacheFullError(ValueError):
    """A text is longer than a line of the KV cache."""


@dataclasses.dataclass(frozen=True)
class About:
    """What generation has to know of a model. end: tokens that end a text. kind: its model_type."""

    kind: str
    vocabulary: int
    end: tuple[int, ...]


class LanguageModel:
    """`LanguageModel.from_pretrained(folder, InferenceConfig(tp_degree=8))`, or `model_files.load(path)` of what `model_files.save` wrote.

    `generation.generate` and `generation.stream` make texts; `prefill`, `decode` and `score` are their steps. nxd_model: with weights; goes to its devices.
    """

    def __init__(self, nxd_model: NxDModel, options: InferenceConfig, about: About):
        self.nxd_model = nxd_model
        self.options = options
        self.about = about
        self._busy = False
        nxd_model.to_neuron()

    @classmethod
    def from_pretrained(cls, folder: str | Path, options: InferenceConfig | None = None) -> LanguageModel:
        """Trace and compile the model of a Hugging Face folder (config.json and safetensors files).

        Raises FileNotFoundError, ValueError for a model_type that is not known, KeyError for missing weights.
        """
        place, options = Path(folder), options or InferenceConfig()
        config = building.read_config(place)
        model = building.build(config, options, building.read_files(place))
        return cls(model, options, About(config.model_type, config.vocab_size, end_tokens(place, config)))

    def prefill(self, prompts: Sequence[Sequence[int]], lines: Sequence[int]) -> torch.Tensor:
        """Read prompts (at most `options.prompts_at_once`) into lines of the cache; what follows each: logits [prompts, V], or tokens [prompts].

        Raises CacheFullError for a prompt above max_context_length, ValueError for an empty one, for tokens outside of the vocabulary and for lines that
        are not there.
        """
        rows = self.options.prompts_at_once
        if not 0 < len(prompts) <= rows or len(prompts) != len(lines):
            raise ValueError(
                f"{len(prompts)} prompts for {len(lines)} lines: a prefill takes 1 to {rows} (ctx_batch_size), each with its line"
            )
        if len(set(lines)) != len(lines) or not all(0 <= line < self.options.batch_size for line in lines):
            raise ValueError(f"lines {list(lines)} must be different numbers below batch_size={self.options.batch_size}")
        for prompt in prompts:
            self.check_prompt(prompt)
        tokens = fitting(self.options.context_buckets, max(map(len, prompts)))
        assert tokens is not None
        ids, mask = torch.zeros(rows, tokens, dtype=torch.int64), torch.zeros(rows, tokens, dtype=torch.int64)
        filled = [*prompts, *[prompts[0]] * (rows - len(prompts))]  # the same prompt in the same line, as often as it takes
        for row, prompt in enumerate(filled):
            ids[row, : len(prompt)] = torch.tensor(prompt)
            mask[row, : len(prompt)] = 1
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self.options.batch_size > 1:
            inputs["seq_ids"] = torch.tensor([*lines, *[lines[0]] * (rows - len(lines))])
        return self._run(building.prefill_tag(tokens), inputs)[: len(prompts)]

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """A block that has all lines of the cache for itself. Raises RuntimeError within another one."""
        if self._busy:
            raise RuntimeError(
                "the model is making other texts, whose lines of the KV cache these would overwrite: take them to their end, or close() them"
            )
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def check_prompt(self, prompt: Sequence[int], name: str = "the prompt") -> None:
        """Raise what `prefill` does for a prompt."""
        if not prompt:
            raise ValueError(f"{name} is empty: there must be a token to go on from")
        if len(prompt) > self.options.longest_prompt:
            raise CacheFullError(
                f"{name} has {len(prompt)} tokens, and the model was traced for {self.options.longest_prompt} (max_context_length; seq_len "
                f"{self.options.seq_len}): trace it for more, or shorten the text"
            )
        wrong = [t for t in prompt if not 0 <= t < self.about.vocabulary]
        if wrong:
            raise ValueError(
                f"{name} has token {wrong[0]}, and the model knows 0 to {self.about.vocabulary - 1}: is it another model's tokenizer?"
            )

    def decode(self, tokens: Sequence[int], positions: Sequence[int], used: Sequence[int] | None = None) -> torch.Tensor:
        """One more token of each line, at its position: what follows, logits [batch, V] or tokens [batch].

        used: the lines that count, default all; others may hold anything. Raises CacheFullError for a position behind the last slot.
        """
        return self._later("decode", torch.tensor(tokens)[:, None], positions, used)[:, 0]

    def score(self, tokens: Sequence[Sequence[int]], positions: Sequence[int], used: Sequence[int] | None = None) -> torch.Tensor:
        """Several tokens of each line, the first at its position: what follows each, logits [batch, tokens, V] or tokens [batch, tokens].

        Raises ValueError without speculation_length tokens for each line, CacheFullError as `decode` does.
        """
        given = torch.tensor(tokens)
        if given.shape != (self.options.batch_size, self.options.speculation_length):
            raise ValueError(
                f"tokens of shape {list(given.shape)}: score takes [batch_size {self.options.batch_size}, speculation_length "
                f"{self.options.speculation_length}]"
            )
        return self._later(building.SPECULATION, given, positions, used)

    def _later(self, tag: str, ids: torch.Tensor, positions: Sequence[int], used: Sequence[int] | None) -> torch.Tensor:
        counted = range(len(positions)) if used is None else used
        needed = max(positions[line] for line in counted) + ids.shape[1]
        slots = fitting(self.options.decode_buckets, needed)
        if slots is None:
            raise CacheFullError(
                f"the KV cache is full: a text has {needed} tokens, and a line holds {self.options.seq_len} (seq_len): trace it for more"
            )
        inputs = {"input_ids": ids, "position_ids": torch.tensor(positions)}
        return self._run(building.decode_tag(slots, tag), inputs)

    def _run(self, tag: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = self.nxd_model(model_name=tag, **inputs)
        return found


def end_tokens(folder: Path, config: Any) -> tuple[int, ...]:
    """The tokens that end a text: of generation_config.json, else of config.json."""
    file = folder / "generation_config.json"
    said = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    said = getattr(config, "eos_token_id", None) if said is None else said
    return () if said is None else tuple(said) if isinstance(said, list) else (int(said),)
