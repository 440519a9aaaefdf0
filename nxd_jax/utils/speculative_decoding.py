"""`neuronx_distributed.utils.speculative_decoding`: a small model drafts tokens, and the large one checks several of them in one forward pass."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from nxd_jax.utils import medusa_decoding


def accept(drafted: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
    """The greedy rule: the drafted tokens as far as the model says the same, and one token more, which is the model's own; [1, 1 to n + 1].

    drafted: [1, n]. said: the model's best tokens [1, at least n + 1], the first in place of the first drafted one. How many are accepted is read.
    """
    equal = (drafted == said[:, : drafted.shape[1]]).long().cumprod(dim=1).sum()
    return said[:, : int(equal) + 1]


class NeuronSpeculation:
    """`NeuronSpeculation`: gives a generation adapter `_assisted_decoding`. What comes out is what greedy decoding of the model alone gives.

    A mixin. The model (self) and the draft have `prepare_inputs_for_generation(input_ids, attention_mask=..., ...)`, whose dict they are called with, and
    give `.logits`. After the first call (`kv_cache_populated`) it takes the last token alone, at the position after as many as the mask has ones.
    The draft also has `_update_model_kwargs_for_generation(outputs, kwargs, is_for_token_generation, is_encoder_decoder=)`, which adds a one to the mask,
    and `num_assistant_tokens` (or that of its `generation_config`), the number of its steps for each of the model's. The model takes `speculation_length`
    tokens of its `neuron_config` (or `config`) at once, with `attention_mask` and `position_ids` [1, speculation_length], and single ones. Entries of both
    caches from a position on may be written again.

    A Medusa model (`is_medusa`) needs no draft. It gives `["hidden_states"]`, the `TOPK` best tokens [1 + heads, positions, TOPK] of its own and of each head
    (`Sampler`), for the last token of the prompt, and for all nodes of the tree `medusa_tree`, in their order. Those come through
    `prepare_medusa_inputs_for_generation(tokens [1, nodes], attention_mask=, position_ids=, medusa_mask=, scatter_index=, accepted_indices=, current_length=)`:
    the cache's entries at `accepted_indices` move to `current_length` before it is read, as far as the mask has ones; the nodes see each other as `medusa_mask`
    says, and are written at `scatter_index`. The cache needs room for the tree after the last token. `medusa_speculation_length` is the number of nodes.
    """

    def _assisted_decoding(
        self,
        input_ids: torch.Tensor,
        candidate_generator: Any,
        do_sample: bool = False,
        stopping_criteria: Any = None,
        pad_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """The prompt [1, length], without padding, and the tokens after it, up to the `max_length` of the stopping criteria or an end token, which is included.

        candidate_generator: its `assistant_model` is the draft. Raises ValueError for sampling, several sequences, padding on the left, no `max_length`, end
        tokens without a token to pad with, a `speculation_length` below 1, or a `medusa_speculation_length` that is not the tree's.
        """
        if do_sample:
            raise ValueError("do_sample=True: speculation is greedy; pass do_sample=False")
        medusa = getattr(_settings(self), "is_medusa", False)
        decode = self._medusa_assisted_decoding if medusa else self._standard_assisted_decoding
        draft = getattr(candidate_generator, "assistant_model", None)
        return decode(input_ids, draft, stopping_criteria, pad_token_id, eos_token_id, **model_kwargs)

    def _standard_assisted_decoding(
        self,
        input_ids: torch.Tensor,
        assistant_model: Any,
        stopping_criteria: Any,
        pad_token_id: Any,
        eos_token_id: Any,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """`_assisted_decoding` with a draft model."""
        model: Any = self
        ends, pad = _end_tokens(model, eos_token_id, pad_token_id)
        limit = _max_length(stopping_criteria)
        at_once = _speculation_length(model)
        mask = model_kwargs.pop("attention_mask", None)
        text = _unpadded(input_ids, mask)
        mask = torch.ones_like(input_ids) if mask is None else mask
        draft = _Draft(assistant_model, at_once, ends, model_kwargs)
        new = _first(model, input_ids, mask, text.shape[1], model_kwargs)
        draft.read(input_ids, mask)
        while True:
            text = torch.cat((text, _until(new, ends)), dim=1)[:, :limit]
            position = text.shape[1] - 1
            if text.shape[1] == limit or int(text[0, -1]) in ends:
                return text
            mask = _ones(mask, position)
            drafted = draft.tokens(text, mask) if position + at_once <= limit else text[:, :0]
            tokens = torch.cat((text[:, -1:], drafted), dim=1)
            if position + at_once <= limit:
                tokens = torch.nn.functional.pad(tokens, (0, at_once - tokens.shape[1]), value=pad)
            places = torch.arange(position, position + tokens.shape[1], device=text.device)[None]
            said = model(input_ids=tokens, attention_mask=mask, position_ids=places).logits.argmax(dim=-1)
            new = accept(drafted, said)

    def _medusa_assisted_decoding(
        self,
        input_ids: torch.Tensor,
        assistant_model: Any,
        stopping_criteria: Any,
        pad_token_id: Any,
        eos_token_id: Any,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """`_assisted_decoding` of a Medusa model."""
        ends, _ = _end_tokens(self, eos_token_id, 0 if pad_token_id is None else pad_token_id)
        limit = _max_length(stopping_criteria)
        mask = model_kwargs.pop("attention_mask", None)
        length = _unpadded(input_ids, mask).shape[1]

        def finished(text: torch.Tensor) -> torch.Tensor | None:
            cut = torch.cat((text[:, :length], _until(text[:, length:], ends)), dim=1)[:, :limit]
            return cut if cut.shape[1] == limit or int(cut[0, -1]) in ends else None

        mask = torch.ones_like(input_ids) if mask is None else mask
        return medusa_decoding.decode(self, input_ids, mask, length, finished, **model_kwargs)


class _Draft:
    """The draft model: reads the prompt, then gives the tokens that it would go on with."""

    def __init__(self, model: Any, at_once: int, ends: Collection[int], kwargs: dict[str, Any]) -> None:
        wanted = model.num_assistant_tokens if hasattr(model, "num_assistant_tokens") else model.generation_config.num_assistant_tokens
        self.model, self.ends, self.kwargs = model, ends, kwargs
        self.steps = min(int(wanted), at_once)

    def read(self, prompt: torch.Tensor, mask: torch.Tensor) -> None:
        self.model(**self.model.prepare_inputs_for_generation(prompt, attention_mask=mask, **self.kwargs))

    def tokens(self, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Those of all steps but the last, which only lets the draft see the token of the one before: all may be accepted."""
        kwargs = {**self.kwargs, "attention_mask": mask}
        before = text.shape[1]
        for _ in range(self.steps):
            populated = self.model.kv_cache_populated
            outputs = self.model(**self.model.prepare_inputs_for_generation(text, **kwargs))
            text = torch.cat((text, outputs.logits[:, -1:].argmax(dim=-1)), dim=1)
            kwargs = self.model._update_model_kwargs_for_generation(outputs, kwargs, populated, is_encoder_decoder=False)
            if int(text[0, -1]) in self.ends:
                break
        return text[:, before:-1]


def _settings(model: Any) -> Any:
    return getattr(model, "neuron_config", None) or model.config


def _first(model: Any, prompt: torch.Tensor, mask: torch.Tensor, length: int, kwargs: dict[str, Any]) -> torch.Tensor:
    """The token after the prompt. Models give the logits of its last token alone, or of all."""
    logits = model(**model.prepare_inputs_for_generation(prompt, attention_mask=mask, **kwargs)).logits
    at = 0 if logits.shape[1] == 1 else length - 1
    return logits[:, at : at + 1].argmax(dim=-1)


def _until(tokens: torch.Tensor, ends: Collection[int]) -> torch.Tensor:
    """Tokens up to the first end token."""
    found = [i for i, token in enumerate(tokens[0].tolist()) if token in ends]
    return tokens[:, : found[0] + 1] if found else tokens


def _ones(mask: torch.Tensor, count: int) -> torch.Tensor:
    """A mask whose first `count` entries are ones, at least as long as the one given."""
    return (torch.arange(max(count, mask.shape[1]), device=mask.device) < count).to(mask.dtype)[None]


def _unpadded(input_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if input_ids.shape[0] != 1:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}: speculation takes one sequence at a time, [1, length]")
    if mask is None:
        return input_ids
    length = int(mask.sum())
    if not bool(mask[0, :length].all()):
        raise ValueError("attention_mask has zeros before its ones: speculation needs padding on the right (padding_side='right')")
    return input_ids[:, :length]


def _end_tokens(model: Any, given: Any, pad: int | None) -> tuple[set[int], int]:
    """The tokens that end a text, and the one to pad with."""
    defaults = getattr(model, "generation_config", None)
    given = getattr(defaults, "eos_token_id", None) if given is None else given
    pad = getattr(defaults, "pad_token_id", None) if pad is None else pad
    ends = set() if given is None else {int(token) for token in torch.as_tensor(given).reshape(-1)}
    if ends and pad is None:
        raise ValueError(f"eos_token_id={given} is given without pad_token_id: pass that, too")
    return ends, 0 if pad is None else int(pad)


def _max_length(criteria: Any) -> int:
    found = [one.max_length for one in criteria or () if getattr(one, "max_length", None) is not None]
    if not found:
        raise ValueError(
            "stopping_criteria has no max_length: add transformers.MaxLengthCriteria(max_length), of prompt and new tokens together"
        )
    return int(min(found))


def _speculation_length(model: Any) -> int:
    found = getattr(_settings(model), "speculation_length", 0)
    if found < 1:
        raise ValueError(f"speculation_length={found} of the model's configuration must be 1 or more: the tokens that it checks at once")
    return int(found)
