"""What scripts hand to `generate()`, and what it returns beside tokens: caches, scores, criteria, processors, streamers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers

from tests.torch_bridge.generation.models import END, Compiled, generated, on_cpu, on_xla, prompt
from torch_bridge.generation import caches, callables, generate, requests


@pytest.fixture(scope="module")
def model() -> Any:
    """On xla; tests do not change it, and so share its programs."""
    return on_xla("llama")


@pytest.fixture
def hints(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(generate, "_said", set())
    caplog.set_level(logging.WARNING, "torch_bridge")

    class Hints(list[str]):
        def __iter__(self) -> Any:
            return iter([r.getMessage() for r in caplog.records if "generate() on xla" in r.getMessage()])

    return Hints()


def test_scores_states_and_the_cache(model: Any) -> None:
    """As in eager torch: on the device of the prompt, and a cache that grows, with which a script can go on."""
    ids = prompt(2, 6)
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = on_cpu("llama").generate(ids, output_hidden_states=True, **options)
    found = model.generate(ids.to("xla"), output_hidden_states=True, **options)
    assert type(found) is type(expected) and list(found) == list(expected) and found.sequences.device.type == "xla"
    assert found.sequences.tolist() == expected.sequences.tolist()
    for name in ("scores", "logits"):
        torch.testing.assert_close([x.cpu() for x in found[name]], list(expected[name]), rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close([x.cpu() for x in mine], list(theirs), rtol=1e-4, atol=1e-5)
    assert type(found.cache) is transformers.DynamicCache and found.cache.get_seq_length() == 9
    for mine, theirs in zip(found.cache.layers, expected.cache.layers, strict=True):
        torch.testing.assert_close(mine.keys.cpu(), theirs.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.values.cpu(), theirs.values, rtol=1e-4, atol=1e-5)


def test_no_end_token(model: Any) -> None:
    """None says more than nothing: the text goes on behind the model's own end token."""
    ids, options = prompt(2, 7), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = on_cpu("llama").generate(ids, **options)
    assert END in expected[1, 7:-1] and model.generate(ids.to("xla"), **options).tolist() == expected.tolist()


def test_a_static_cache_of_the_scripts(model: Any) -> None:
    """It is filled; a second call goes on with it."""
    ids = prompt(1, 6)
    expected = generated(on_cpu("llama"), ids, max_new_tokens=12)
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    first = model.generate(ids.to("xla"), cache=cache, max_new_tokens=6, do_sample=False)
    assert int(cache.get_seq_length()) == 11 and first.tolist() == expected[:, :12].tolist()
    second = model.generate(first, cache=cache, max_new_tokens=6, do_sample=False)
    assert second.tolist() == expected.tolist() and int(cache.get_seq_length()) == 17


def test_a_static_cache_that_is_full(model: Any) -> None:
    """At the token at which eager torch raises, too."""
    for on in (model, on_cpu("llama")):
        cache = transformers.StaticCache(config=model.config, max_cache_len=8)
        with pytest.raises(IndexError) as error:
            generated(on, prompt(1, 6), cache=cache, max_new_tokens=6)
        if on is model:
            assert "at token 9 and was given a StaticCache of 8 places: make it with max_cache_len=9 or more" in str(error.value)


def test_a_dynamic_cache_of_the_scripts(model: Any, hints: list[str]) -> None:
    """It grows as without us, and a line says that this compiles for each length; once."""
    ids = prompt(1, 6)
    cache = transformers.DynamicCache(config=model.config)
    found = model.generate(ids.to("xla"), cache=cache, max_new_tokens=2, do_sample=False)
    assert found.tolist() == generated(on_cpu("llama"), ids, max_new_tokens=2).tolist() and cache.get_seq_length() == 7
    model.generate(found, cache=cache, max_new_tokens=1, do_sample=False)
    (text,) = hints
    assert text.startswith("LlamaForCausalLM.generate() on xla: tensors grow with each token, and each length is compiled")
    assert "because it is given a DynamicCache. " in text
    assert text.endswith("or give a transformers.StaticCache that is long enough.")


REASONS: dict[str, dict[str, Any]] = {
    "use_cache is False": {"use_cache": False},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "guidance_scale": {"guidance_scale": 1.5},
    'cache_implementation is "dynamic"': {"cache_implementation": "dynamic"},
    "the mode is assisted generation": {"prompt_lookup_num_tokens": 2},
    "custom_generate": {"custom_generate": lambda model, **kwargs: None},
    "prefill_chunk_size": {"prefill_chunk_size": 2},
    "synced_gpus": {"synced_gpus": True},
    "it is given inputs_embeds, beside ids": {"inputs_embeds": torch.zeros(1, 2, 64)},
    "there are no ids": {"attention_mask": torch.ones(1, 3)},
}


@pytest.mark.parametrize("words", REASONS)
def test_what_runs_as_it_is(model: Any, words: str) -> None:
    given = REASONS[words] if "no ids" in words else {"inputs": prompt(1, 3), **REASONS[words]}
    reason = requests.Request(transformers.GenerationMixin.generate, model, (), dict(given)).reason()
    assert reason is not None and words in reason.why and reason.instead.endswith(".")


def test_models_that_run_as_they_are() -> None:
    """By what transformers says of them."""
    small: dict[str, Any] = {
        "vocab_size": 32,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
    }
    bart = transformers.BartForConditionalGeneration(transformers.BartConfig(**small, encoder_attention_heads=2, decoder_attention_heads=2))
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=1))
    for model, words in ((bart, "has an encoder and a decoder"), (mamba, "MambaForCausalLM")):
        reason = requests.Request(transformers.GenerationMixin.generate, model, (prompt(1, 3),), {}).reason()
        assert reason is not None and words in reason.why


def test_a_window_in_a_cache_that_is_returned() -> None:
    asked = {"return_dict_in_generate": True}
    reason = requests.Request(transformers.GenerationMixin.generate, on_cpu("mistral"), (prompt(1, 3),), asked).reason()
    assert reason is not None and "sliding window" in reason.why


def test_criteria_and_processors(model: Any) -> None:
    """On the CPU; those that hold xla tensors get xla tensors."""
    ids = prompt(1, 6)
    reference = on_cpu("llama")
    plain = generated(reference, ids, max_new_tokens=6)
    stop, seen = int(plain[0, 8]), []

    def ends(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(ids.device.type)
        return ids[:, -1] == stop

    assert generated(model, ids, max_new_tokens=6, stopping_criteria=[ends]).tolist() == plain[:, :9].tolist() and set(seen) == {"cpu"}
    seen.clear()
    there = torch.tensor([stop]).to("xla")

    def ends_there(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(ids.device.type)
        return ids[:, -1] == there

    assert generated(model, ids, max_new_tokens=6, stopping_criteria=[ends_there]).tolist() == plain[:, :9].tolist() and set(seen) == {
        "xla"
    }

    def no_stop(device: str) -> list[Any]:
        return [transformers.SuppressTokensLogitsProcessor([stop], device=device)]

    expected = generated(reference, ids, max_new_tokens=6, logits_processor=no_stop("cpu"))
    assert generated(model, ids, max_new_tokens=6, logits_processor=no_stop("xla")).tolist() == expected.tolist() != plain.tolist()
    words = torch.arange(40, 60).to("xla")
    allowed = generated(model, ids, max_new_tokens=6, prefix_allowed_tokens_fn=lambda batch, ids: (words + 0 * ids[-1]).tolist())
    assert set(allowed[0, 6:].tolist()) <= set(range(40, 60))


def test_where_xla_tensors_are_looked_for() -> None:
    t = torch.ones(1).to("xla")

    class Holds:
        def __init__(self, x: Any):
            self.inside = {"a": [x]}

        def __call__(self, ids: Any, scores: Any) -> Any:
            return scores

    def default(ids: Any, scores: Any, x: Any = t) -> Any:
        return scores

    assert callables.holds_xla(Holds(t)) and callables.holds_xla(default) and not callables.holds_xla(Holds(torch.ones(1)))
    assert callables.holds_xla(Holds(torch.device("xla"))) and callables.holds_xla(lambda ids, scores: scores + t)


def test_a_streamer(model: Any) -> None:
    got: list[list[int]] = []

    class Streamer(transformers.generation.streamers.BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            got.append(value.flatten().tolist())

        def end(self) -> None:
            got.append([])

    ids = prompt(1, 6)
    out = generated(model, ids, max_new_tokens=3, streamer=Streamer())
    assert got == [ids[0].tolist(), *([int(x)] for x in out[0, 6:]), []]


def test_wrong_arguments_are_transformers_own(model: Any) -> None:
    with pytest.raises(ValueError, match="model_kwargs"):
        model.generate(prompt(1, 3).to("xla"), no_such_option=1)


def test_lengths_of_caches() -> None:
    assert [caches.length(n) for n in (1, 64, 65, 300, 512, 513, 1500)] == [64, 64, 128, 512, 512, 1024, 1536]


def test_models_on_the_cpu_are_left_alone(hints: list[str]) -> None:
    with Compiled() as compiled:
        generated(on_cpu("llama"), prompt(1, 6), max_new_tokens=2, use_cache=False)
    assert compiled.programs == 0 and list(hints) == []
