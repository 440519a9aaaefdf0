"""What a call of `generate()` asks for, and why it cannot run with fixed shapes, if it cannot."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torch_bridge.generation import caches

CACHES = ("cache", "past_key_values")
"""The names under which transformers takes a cache."""
PROMPTS = ("input_ids", "attention_mask", "position_ids", "token_type_ids")
"""Arguments beside `inputs` whose tensors go to the CPU."""
MODES = ("greedy_search", "sample", "beam_search", "beam_sample")


class Reason(NamedTuple):
    """Why a call runs as it is. why: a clause; instead: what to do, a sentence."""

    why: str
    instead: str


class Request:
    """A call. arguments: by name, those of `generate`'s own signature; kwargs: the others; config: what they come to, with the model's defaults."""

    def __init__(self, original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        bound = inspect.signature(original).bind(model, *args, **kwargs)
        self.model = model
        self.kwargs: dict[str, Any] = dict(bound.arguments.pop("kwargs", {}))
        self.arguments: dict[str, Any] = dict(bound.arguments)
        self.arguments.pop("self")
        given = {k: v for k, v in self.kwargs.items() if k not in ("tokenizer", "assistant_tokenizer")}
        self.config, self.model_kwargs = model._prepare_generation_config(self.arguments.get("generation_config"), **given)

    def given(self, name: str) -> Any:
        """An argument, None if it was not given."""
        return self.arguments.get(name, self.kwargs.get(name))

    @property
    def prompt(self) -> torch.Tensor | None:
        """The ids that it begins with."""
        found = self.given("inputs")
        return self.given("input_ids") if found is None else found

    @property
    def cache(self) -> Any:
        """The cache that the script gave."""
        return next((self.kwargs[name] for name in CACHES if self.kwargs.get(name) is not None), None)

    def tokens(self) -> int:
        """How many there may be at most, with the prompt."""
        before = 1 if self.prompt is None else self.prompt.shape[1]
        new, most = self.config.max_new_tokens, self.config.max_length
        return int(before + new if new is not None else most if most and most > before else before + 20)

    def reason(self) -> Reason | None:
        """Why it runs as it is, None if it need not."""
        return self._of_model() or self._of_call() or self._of_inputs() or self._of_cache()

    def _of_model(self) -> Reason | None:
        model, name = self.model, type(self.model).__name__
        if "cache" not in inspect.signature(type(model).prepare_inputs_for_generation).parameters:
            return Reason(f"{name} prepares its inputs in a way of its own, or transformers is older than 5.24", _PAD)
        if model.config.is_encoder_decoder:
            return Reason(f"{name} has an encoder and a decoder", _PAD)
        if not getattr(model, "_can_compile_fullgraph", False) or not model._supports_default_dynamic_cache():
            return Reason(f"transformers has no cache of a fixed length for {name}", _PAD)
        if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            return Reason("the model lies on several devices", 'Move it to one: model.to("xla").')
        odd = caches.odd_layers(model.config)
        return Reason(f"a cache of {name} has layers of type {odd}, which also keep what has no fixed length", _PAD) if odd else None

    def _of_call(self) -> Reason | None:
        config, given = self.config, self.given
        mode = str(getattr(config.get_generation_mode(given("assistant_model")), "value", ""))
        if given("custom_generate") is not None:
            return Reason("custom_generate is code of its own", "Leave it out, or keep the shapes of its tensors fixed.")
        if mode not in MODES:
            return Reason(f"the mode is {mode.replace('_', ' ')}", "Use greedy search, sampling or beams.")
        if config.use_cache is False:
            return Reason("use_cache is False", "Leave it out: without a cache each token takes the whole text again.")
        if config.output_attentions:
            return Reason(
                "output_attentions asks for weights over a text that grows", "Run model(ids, output_attentions=True) on the result."
            )
        if given("negative_prompt_ids") is not None or (config.guidance_scale is not None and config.guidance_scale != 1):
            return Reason("guidance_scale runs the model on a second text that grows", "Leave it out.")
        if config.prefill_chunk_size is not None:
            return Reason("prefill_chunk_size cuts the prompt", "Leave it out, if the prompt fits in memory.")
        return Reason("synced_gpus is set", "Leave it out.") if given("synced_gpus") else None

    def _of_inputs(self) -> Reason | None:
        others = [name for name, x in self.kwargs.items() if name not in PROMPTS and _has_tensors(x)]
        if others:
            return Reason(
                f"it is given {', '.join(others)}, beside ids and a mask", "Give ids and a mask, if the model's own embeddings do."
            )
        if self.prompt is None and any(self.kwargs.get(name) is not None for name in PROMPTS):
            return Reason("there are no ids", "Give the ids that the mask is for.")
        return None

    def _of_cache(self) -> Reason | None:
        kind, given = self.config.cache_implementation, self.cache
        if kind not in (None, "static"):
            return Reason(f'cache_implementation is "{kind}"', 'Leave it out, or give "static".')
        if given is not None and not caches.is_static(given):
            return Reason(f"it is given a {type(given).__name__}", "Leave it out, or give a transformers.StaticCache that is long enough.")
        if self.config.return_dict_in_generate and given is None and caches.slides(self.model.config):
            return Reason(
                "it returns a cache with a sliding window", "Leave out return_dict_in_generate, or give a transformers.StaticCache."
            )
        return None


_PAD = "Each length is compiled once and kept (NEURON_COMPILE_CACHE_URL): pad prompts to a few lengths."


def _has_tensors(x: object) -> bool:
    if isinstance(x, (list, tuple)):
        return any(_has_tensors(y) for y in x)
    return any(_has_tensors(y) for y in x.values()) if isinstance(x, dict) else isinstance(x, torch.Tensor)
