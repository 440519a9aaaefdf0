"""A language model on its devices: prompts in, tokens out, with the padding and the choice of programs that fixed shapes ask for."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nxd_jax.inference import building, token_ids
from nxd_jax.inference.adapter_slots import AdapterSlots, Base
from nxd_jax.inference.buckets import fitting
from nxd_jax.inference.config import InferenceConfig
from nxd_jax.trace.nxd_model import NxDModel
from nxd_jax.training.models.hf_models.attention import head_dim


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
    base, adapters: of a model with room for LoRA adapters: what they are for, and the slots of those that are among its weights.
    """

    def __init__(
        self, nxd_model: NxDModel, options: InferenceConfig, about: About, base: Base | None = None, adapters: dict[str, int] | None = None
    ):
        self.nxd_model = nxd_model
        self.options = options
        self.about = about
        self._busy = False
        nxd_model.to_neuron()
        self.slots = None if base is None else AdapterSlots(nxd_model, options, base, adapters)
        self._slot_of_line: list[int | None] = [0] * options.batch_size

    @classmethod
    def from_pretrained(cls, folder: str | Path, options: InferenceConfig | None = None) -> LanguageModel:
        """Trace and compile the model of a Hugging Face folder (config.json and safetensors files), and load the adapters of `lora_config`.

        Raises FileNotFoundError, ValueError for a model_type that is not known, KeyError for missing weights, NotImplementedError for weights that are
        quantized already, TypeError for arguments of other types, and what `load_adapter` raises.
        """
        if not isinstance(folder, (str, Path)):
            raise TypeError(
                f"folder must be the path of a Hugging Face folder, got {type(folder).__name__}: write a model with save_pretrained"
            )
        if options is not None and not isinstance(options, InferenceConfig):
            raise TypeError(f"options must be an InferenceConfig or None, got {type(options).__name__}: InferenceConfig(tp_degree=2), say")
        place, options = Path(folder), options or InferenceConfig()
        config = building.read_config(place)
        model = building.build(config, options, building.read_files(place))
        base = None if options.lora_config is None else Base.of(config, head_dim(config))
        found = cls(model, options, About(config.model_type, config.vocab_size, end_tokens(place, config)), base)
        for name, path in options.lora_config.lora_ckpt_paths.items() if options.lora_config else ():
            found.load_adapter(name, path)
        return found

    # -- adapters ------------------------------------------------------------------------------------

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of those that are loaded."""
        return () if self.slots is None else tuple(self.slots.names)

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Load a LoRA adapter of PEFT under a name, in place of one that has the name already. Nothing is compiled.

        Raises ValueError for a model without `lora_config`, an adapter of another model, with a larger rank or of other layers than there is room for, and
        for more than max_loras; FileNotFoundError; RuntimeError while texts are made. Then nothing has changed.
        """
        with self.busy():
            self._left(self._room().load(name, str(folder)))

    def unload_adapter(self, name: str) -> None:
        """Make room for another one. Raises ValueError for a name that is not loaded, RuntimeError while texts are made."""
        with self.busy():
            self._left(self._room().unload(name))

    def _room(self) -> AdapterSlots:
        if self.slots is None:
            raise ValueError(
                "the model has no room for adapters: trace it with InferenceConfig(lora_config=LoraServingConfig(max_loras=...))"
            )
        return self.slots

    def _left(self, slot: int) -> None:
        self._slot_of_line = [None if of == slot else of for of in self._slot_of_line]

    def check_adapters(self, names: Sequence[str | None], prompts: int) -> list[int]:
        """The slots of prompts' adapters. Raises ValueError for a name that is not loaded, and for another number of names than prompts."""
        if len(names) != prompts:
            raise ValueError(f"{len(names)} adapters for {prompts} prompts: name one for each, None for those without")
        return self._room().slots(names) if any(name is not None for name in names) else [0] * prompts

    # -- steps ---------------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[Sequence[int]], lines: Sequence[int], adapters: Sequence[str | None] | None = None) -> torch.Tensor:
        """Read prompts (at most `options.prompts_at_once`) into lines of the cache; what follows each: logits [prompts, V], or tokens [prompts].

        adapters: the prompts' LoRA adapters, by name, None for the model as it is (default all); later tokens of these lines have them, too.

        Raises CacheFullError for a prompt above max_context_length, ValueError for an empty one, for tokens outside of the vocabulary, for lines that are not
        there, and what `check_adapters` raises.
        """
        rows = self.options.prompts_at_once
        if not 0 < len(prompts) <= rows or len(prompts) != len(lines):
            raise ValueError(
                f"{len(prompts)} prompts for {len(lines)} lines: a prefill takes 1 to {rows} (ctx_batch_size), each with its line"
            )
        if len(set(lines)) != len(lines) or not all(0 <= line < self.options.batch_size for line in lines):
            raise ValueError(f"lines {list(lines)} must be different numbers below batch_size={self.options.batch_size}")
        prompts = [token_ids.prompt(prompt) for prompt in prompts]
        for prompt in prompts:
            self.check_prompt(prompt)
        slots = self.check_adapters(adapters or [None] * len(prompts), len(prompts))
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
        if self.slots is not None:
            inputs["adapter_ids"] = torch.tensor([*slots, *[slots[0]] * (rows - len(lines))])
        for line, slot in zip(lines, slots, strict=True):
            self._slot_of_line[line] = slot
        return self._run(building.prefill_tag(tokens), inputs)[: len(prompts)]

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """A block that has all lines of the cache for itself. Raises RuntimeError within another one."""
        if self._busy:
            raise RuntimeError(
                "the model is making other texts, whose lines of the KV cache or adapters this would overwrite: take them to their end, or close() them"
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

        used: the lines that count, default all; others may hold anything. Raises CacheFullError for a position behind the last slot, ValueError for another
        number of tokens or positions than batch_size, negative positions, and tokens outside of the vocabulary, TypeError for what is no whole number.
        """
        given = token_ids.table(tokens, "tokens")
        if given.shape != (self.options.batch_size,):
            raise ValueError(f"tokens of shape {list(given.shape)}: decode takes one for each line, [batch_size {self.options.batch_size}]")
        return self._later("decode", given[:, None], positions, used).select(1, 0)

    def score(self, tokens: Sequence[Sequence[int]], positions: Sequence[int], used: Sequence[int] | None = None) -> torch.Tensor:
        """Several tokens of each line, the first at its position: what follows each, logits [batch, tokens, V] or tokens [batch, tokens].

        Raises ValueError without speculation_length tokens for each line, and what `decode` does.
        """
        given = token_ids.table(tokens, "tokens")
        if given.shape != (self.options.batch_size, self.options.speculation_length):
            raise ValueError(
                f"tokens of shape {list(given.shape)}: score takes [batch_size {self.options.batch_size}, speculation_length "
                f"{self.options.speculation_length}]"
            )
        return self._later(building.SPECULATION, given, positions, used)

    def _later(self, tag: str, ids: np.ndarray[Any, Any], positions: Sequence[int], used: Sequence[int] | None) -> torch.Tensor:
        places, size = token_ids.table(positions, "positions"), self.options.batch_size
        counted = list(range(size)) if used is None else list(used)
        if places.shape != (size,):
            raise ValueError(f"positions of shape {list(places.shape)}: there is one for each line, [batch_size {size}]")
        if not counted or not all(0 <= line < size for line in counted):
            raise ValueError(f"used={counted} must be some numbers below batch_size={size}")
        if places[counted].min() < 0:
            raise ValueError(f"positions={places.tolist()} of lines {counted} must be 0 or more: the first token has position 0")
        if ids[counted].min() < 0 or ids[counted].max() >= self.about.vocabulary:
            raise ValueError(f"tokens={ids.tolist()} of lines {counted} must be 0 to {self.about.vocabulary - 1}, which the model knows")
        needed = int(places[counted].max()) + ids.shape[1]
        slots = fitting(self.options.decode_buckets, needed)
        if slots is None:
            raise CacheFullError(
                f"the KV cache is full: a text has {needed} tokens, and a line holds {self.options.seq_len} (seq_len): trace it for more"
            )
        inputs = {"input_ids": torch.from_numpy(ids), "position_ids": torch.from_numpy(places)}
        if self.slots is not None:
            gone = [line for line in counted if self._slot_of_line[line] is None]
            if gone:
                raise ValueError(
                    f"the adapter that line {gone[0]} was read with is not loaded any more: read its text again with `prefill`"
                )
            inputs["adapter_ids"] = torch.from_numpy(np.array([slot or 0 for slot in self._slot_of_line]))
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
