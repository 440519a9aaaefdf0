"""Texts of a small Llama on two ranks: transformers' `generate` says which."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from nxd_jax.inference import generation, speculation
from nxd_jax.inference.config import InferenceConfig
from nxd_jax.inference.language_model import CacheFullError, LanguageModel
from nxd_jax.inference.lora_serving import LoraServingConfig
from nxd_jax.tensor_parallel.head_plans import GQA
from nxd_jax.training.evaluation.generation import Choosing
from tests.nxd_jax.inference import small

SIZES: dict[str, Any] = {"tp_degree": 2, "batch_size": 2, "seq_len": 40, "max_context_length": 16}
LENGTHS = (3, 12, 7, 16, 1)
"""More prompts than the cache has lines."""
NEVER = 10**6


@pytest.fixture(scope="module")
def theirs() -> Any:
    """transformers' model."""
    return small.model("llama")


@pytest.fixture(scope="module")
def model(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """The same with a cache of two lines; it scores four tokens at once, too."""
    place = tmp_path_factory.mktemp("llama")
    theirs.save_pretrained(place)
    return LanguageModel.from_pretrained(place, InferenceConfig(**SIZES, decode_buckets=(20, 40), speculation_length=4))


@pytest.fixture(scope="module")
def draft(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """The model's first layer, which guesses some tokens right; it chooses them on the device."""
    place = tmp_path_factory.mktemp("draft")
    first = small.model("llama", num_hidden_layers=1)
    first.load_state_dict({name: t for name, t in theirs.state_dict().items() if ".layers.1." not in name})
    first.save_pretrained(place)
    return LanguageModel.from_pretrained(place, InferenceConfig(**SIZES, on_device_sampling=True))


def compilations() -> list[str]:
    """Gets a name whenever XLA compiles something."""
    found: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: found.append(name) if "backend_compile" in name else None)
    return found


def test_greedy_and_nothing_is_compiled(theirs: Any, model: LanguageModel) -> None:
    """Prompts of other lengths take lines as they become free; answers fill the cache."""
    prompts, compiled = small.prompts(LENGTHS), compilations()
    expected = small.answers(theirs, prompts, 40, end=NEVER)
    before = len(compiled)
    assert generation.generate(model, prompts, end=[NEVER]) == expected
    assert len(compiled) == before
    jax.jit(lambda x: x + 41)(1)
    assert len(compiled) > before


def test_each_row_ends_by_itself(theirs: Any, model: LanguageModel) -> None:
    """A token that some answers have ends those, the first one of an answer too."""
    prompts = small.prompts(LENGTHS)
    whole = small.answers(theirs, prompts, 40, end=NEVER)
    for end in (whole[0][2], whole[1][0]):
        cut = [answer[: answer.index(end)] if end in answer else answer for answer in whole]
        assert cut != whole
        assert generation.generate(model, prompts, end=[end]) == cut
    assert generation.generate(model, prompts, 5, end=[NEVER]) == [answer[:5] for answer in whole]


def test_tokens_as_they_are_made(model: LanguageModel) -> None:
    """Two prompts are answered in turns, and each says which of its tokens is the last."""
    made = list(generation.stream(model, small.prompts([3, 5]), 3, end=[NEVER]))
    assert [one.prompt for one in made] == [0, 1, 0, 1, 0, 1]
    assert [one.last for one in made] == [False] * 4 + [True] * 2
    answers = generation.generate(model, small.prompts([3, 5]), 3, end=[NEVER])
    assert [[one.token for one in made if one.prompt == k] for k in (0, 1)] == answers


def test_one_stream_at_a_time(model: LanguageModel) -> None:
    prompts = small.prompts([3, 5])
    first = generation.stream(model, prompts, 3, end=[NEVER])
    next(first)
    with pytest.raises(RuntimeError, match="the model is making other texts"):
        next(generation.stream(model, prompts))
    first.close()
    assert len(generation.generate(model, prompts, 3, end=[NEVER])) == 2


def test_a_draft_changes_nothing(model: LanguageModel, draft: LanguageModel) -> None:
    """Answers fill the cache to its last slot, some rows earlier than others; and one ends amid accepted tokens."""
    prompts = small.prompts(LENGTHS)
    plain = generation.generate(model, prompts, end=[NEVER])
    assert generation.generate(model, prompts, end=[NEVER], draft=draft) == plain
    end = plain[0][3]
    cut = [answer[: answer.index(end)] if end in answer else answer for answer in plain]
    assert generation.generate(model, prompts, end=[end], draft=draft) == cut


@pytest.mark.core(keep=1)
@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(("at_once", "batch", "draft_tp"), [(2, 1, 4), (5, 2, 1), (3, 2, 4), (4, 1, 1)])
def test_drafts_on_other_ranks(at_once: int, batch: int, draft_tp: int, theirs: Any, tmp_path: Path) -> None:
    """A draft of one layer; ends come after as many tokens as a check can accept, one fewer and one more."""
    first = small.model("llama", num_hidden_layers=1)
    first.load_state_dict({name: t for name, t in theirs.state_dict().items() if ".layers.1." not in name})
    for name, one in (("model", theirs), ("draft", first)):
        one.save_pretrained(tmp_path / name)
    sizes = {**SIZES, "batch_size": batch}
    model = LanguageModel.from_pretrained(tmp_path / "model", InferenceConfig(**sizes, speculation_length=at_once))
    guesses = LanguageModel.from_pretrained(tmp_path / "draft", InferenceConfig(**sizes | {"tp_degree": draft_tp}))
    prompts = small.prompts(LENGTHS)
    whole = small.answers(theirs, prompts, 40, end=NEVER)
    for end in (NEVER, *(whole[0][at_once + k] for k in (-1, 0, 1))):
        cut = [answer[: answer.index(end)] if end in answer else answer for answer in whole]
        assert generation.generate(model, prompts, end=end, draft=guesses) == cut


def test_right_guesses_save_calls(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is its own draft guesses all: each call gives four tokens."""
    (prompt,) = small.prompts([4])
    calls: list[int] = []
    score = model.score
    monkeypatch.setattr(model, "score", lambda *args: calls.append(1) or score(*args))
    found = generation.generate(model, [prompt], 21, end=[NEVER], draft=model)
    assert len(calls) == 5
    assert found == generation.generate(model, [prompt], 21, end=[NEVER])


def test_what_a_draft_guessed_right() -> None:
    assert speculation.accepted([4, 5, 6], [4, 5, 6, 7]) == [4, 5, 6, 7]
    assert speculation.accepted([4, 9, 6], [4, 5, 6, 7]) == [4, 5]
    assert speculation.accepted([9, 5, 6], [4, 5, 6, 7]) == [4]


def test_choosing_on_the_device(theirs: Any, draft: LanguageModel) -> None:
    prompts = small.prompts([4, 9])
    first = small.model("llama", num_hidden_layers=1)
    first.load_state_dict({name: t for name, t in theirs.state_dict().items() if ".layers.1." not in name})
    assert generation.generate(draft, prompts, 6, end=[NEVER]) == small.answers(first, prompts, 40, 6, end=NEVER)


def test_drawn_tokens(model: LanguageModel) -> None:
    """One seed gives one text; with one token to draw from it is the likeliest."""
    prompts = small.prompts([4, 9])
    hot = Choosing(sample=True, temperature=1.0, top_k=0, top_p=0.9)
    texts = [generation.generate(model, prompts, 8, end=[NEVER], choosing=hot, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    cold = Choosing(sample=True, temperature=1e-6, top_k=0, top_p=0.9)
    greedy = generation.generate(model, prompts, 8, end=[NEVER])
    assert generation.generate(model, prompts, 8, end=[NEVER], choosing=cold) == greedy


def test_what_does_not_fit(model: LanguageModel, draft: LanguageModel) -> None:
    """All is said before the first token."""
    fits, long, full = small.prompts([4, 17, 16])
    for prompts, most, words in (
        ([fits, long], None, "prompt 1 has 17 tokens, and the model was traced for 16 (max_context_length; seq_len 40)"),
        ([full], 25, "prompt 0 has 16 tokens; with max_new_tokens=25 that is more than the KV cache holds, 40 (seq_len)"),
    ):
        with pytest.raises(CacheFullError) as error:
            generation.stream(model, prompts, most)
        assert words in str(error.value)
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        generation.stream(model, [[]])
    with pytest.raises(ValueError, match=f"prompt 0 has token {small.VOCABULARY}, and the model knows 0 to {small.VOCABULARY - 1}"):
        generation.stream(model, [[small.VOCABULARY]])
    with pytest.raises(ValueError, match="max_new_tokens=0 must be at least 1"):
        generation.stream(model, [fits], 0)
    with pytest.raises(ValueError, match="leave choosing out, or trace it without"):
        generation.stream(draft, [fits], choosing=Choosing())
    with pytest.raises(ValueError, match="greedy decoding only"):
        generation.stream(model, [fits], draft=draft, choosing=Choosing(sample=True, temperature=1.0))
    with pytest.raises(ValueError, match="scores several tokens at once"):
        generation.stream(draft, [fits], draft=model)


def test_token_ids_of_any_kind(model: LanguageModel) -> None:
    """Lists, arrays and tensors; end tokens alone or several."""
    prompts = small.prompts([4, 4])
    expected = generation.generate(model, prompts, 3, end=[NEVER])
    for given in (
        [np.array(one) for one in prompts],
        [torch.tensor(one) for one in prompts],
        [torch.tensor(one, dtype=torch.int32).to("xla") for one in prompts],
        torch.tensor(prompts),
        np.array(prompts, dtype=np.uint16),
        tuple(tuple(torch.tensor(token) for token in one) for one in prompts),
    ):
        assert generation.generate(model, given, 3, end=NEVER) == expected  # type: ignore[arg-type]
    assert generation.generate(model, prompts, 3, end=torch.tensor([NEVER, expected[0][1]]))[0] == expected[0][:1]  # type: ignore[arg-type]
    assert generation.generate(model, []) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            "hello",
            "prompts must be a list with the token ids of each prompt, got 'hello': give token ids, such as tokenizer(text)[\"input_ids\"]",
        ),
        ({"input_ids": [[1]]}, "prompts must be a list with the token ids of each prompt, got {'input_ids': [[1]]}"),
        ([1, 2], "got [1, 2]: put a single prompt into a list, too"),
        (torch.tensor([1, 2]), "put a single prompt into a list, too"),
        ([[3], "hello"], "prompt 1 is 'hello': give token ids"),
        ([[1.5, 2.5]], "prompt 0 is [1.5, 2.5]: give token ids"),
        ([[True, False]], "prompt 0 is [True, False]"),
        ([torch.ones(3)], "prompt 0 is array([1., 1., 1.]"),
        ([[[1, 2]]], "prompt 0 is [[1, 2]]"),
        ([[[1], [1, 2]]], "prompt 0 is [[1], [1, 2]]"),
    ],
)
def test_what_is_no_token_id(model: LanguageModel, given: Any, words: str) -> None:
    """Numbers with fractions were cut off, without a word."""
    with pytest.raises(TypeError) as error:
        generation.generate(model, given, 3)
    assert words in str(error.value)


def test_arguments_of_other_types(theirs: Any, model: LanguageModel, tmp_path: Path) -> None:
    fits = small.prompts([4])
    with pytest.raises(TypeError, match="draft must be a LanguageModel, got LlamaForCausalLM"):
        generation.stream(model, fits, draft=theirs)
    with pytest.raises(TypeError, match=r"choosing must be a Choosing of nxd_jax.training.evaluation.generation, got dict"):
        generation.stream(model, fits, choosing={"temperature": 1.0})  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="folder must be the path of a Hugging Face folder, got LlamaForCausalLM: write a model with save_pretrained"
    ):
        LanguageModel.from_pretrained(theirs)
    with pytest.raises(TypeError, match="options must be an InferenceConfig or None, got dict"):
        LanguageModel.from_pretrained(tmp_path, {"tp_degree": 2})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"lora_ckpt_paths=\['a'\] must be a dict of names and folders"):
        LoraServingConfig(lora_ckpt_paths=["a"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"end must be whole numbers, in rows of one length, got 'x'"):
        generation.stream(model, fits, end="x")  # type: ignore[arg-type]


def test_steps_say_what_they_take(model: LanguageModel) -> None:
    (prompt,) = small.prompts([4])
    with pytest.raises(ValueError, match="3 prompts for 1 lines: a prefill takes 1 to 2"):
        model.prefill([prompt] * 3, [0])
    with pytest.raises(ValueError, match=r"lines \[0, 0\] must be different numbers below batch_size=2"):
        model.prefill([prompt] * 2, [0, 0])
    with pytest.raises(CacheFullError, match="the KV cache is full: a text has 41 tokens, and a line holds 40"):
        model.decode([3, 3], [40, 0])
    with pytest.raises(CacheFullError, match="a text has 42 tokens"):
        model.score([[3] * 4] * 2, [38, 0])
    with pytest.raises(ValueError, match=r"score takes \[batch_size 2, speculation_length 4\]"):
        model.score([[3] * 3] * 2, [0, 0])
    for tokens, positions, used, words in (
        ([3], [0, 0], None, r"tokens of shape \[1\]: decode takes one for each line, \[batch_size 2\]"),
        ([3, 3], [0], None, r"positions of shape \[1\]: there is one for each line, \[batch_size 2\]"),
        ([3, 3], [4, -1], None, r"positions=\[4, -1\] of lines \[0, 1\] must be 0 or more"),
        ([3, small.VOCABULARY], [4, 4], None, "must be 0 to 258, which the model knows"),
        ([-1, 3], [4, 4], [0], r"tokens=\[\[-1\], \[3\]\] of lines \[0\] must be 0 to 258"),
        ([3, 3], [4, 4], [2], r"used=\[2\] must be some numbers below batch_size=2"),
        ([3, 3], [4, 4], [], r"used=\[\] must be some numbers below batch_size=2"),
    ):
        with pytest.raises(ValueError, match=words):
            model.decode(tokens, positions, used)
    with pytest.raises(TypeError, match=r"positions must be whole numbers, in rows of one length, got \[0.5, 1.0\]"):
        model.decode([3, 3], [0.5, 1.0])  # type: ignore[list-item]
    assert model.decode([-1, 3], [-1, 4], [1]).shape == (2, small.VOCABULARY), "lines that do not count hold anything"


def test_scores_are_those_of_the_whole_text(theirs: Any, model: LanguageModel) -> None:
    (text,) = small.prompts([10])
    model.prefill([text[:6]], [1])
    found = model.score([[0] * 4, text[6:]], [0, 6])
    torch.testing.assert_close(found[1], small.logits(theirs, text)[6:], atol=1e-4, rtol=1e-4)


@pytest.mark.core(keep=0)
@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "mixtral", "mistral"])
def test_other_models(kind: str, tmp_path: Path) -> None:
    """With continuous batching: one prompt at a time is read."""
    theirs = small.folder(tmp_path, kind)
    model = LanguageModel.from_pretrained(tmp_path, InferenceConfig(**SIZES, is_continuous_batching=True))
    prompts = small.prompts(LENGTHS[:3])
    assert generation.generate(model, prompts, 12) == small.answers(theirs, prompts, 40, 12)


@pytest.mark.core(keep=0)
@pytest.mark.parametrize("top_k", [3, 500])
def test_drawn_on_the_device(top_k: int, tmp_path: Path) -> None:
    """As often as their probability among the likeliest says, and the same again for torch's seed."""
    theirs = small.folder(tmp_path, "llama", initializer_range=0.05)
    options = InferenceConfig(tp_degree=2, batch_size=64, seq_len=8, max_context_length=4, on_device_sampling=True, top_k=top_k)
    model = LanguageModel.from_pretrained(tmp_path, options)
    (prompt,) = small.prompts([4])
    draws = []
    for seed in (1, 1, *range(2, 20)):
        torch.manual_seed(seed)
        draws.append(model.prefill([prompt] * 64, range(64)))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    seen = torch.bincount(torch.cat(draws[1:]), minlength=small.VOCABULARY) / (64 * len(draws[1:]))
    logits = small.logits(theirs, prompt)[-1]
    best = logits.topk(min(top_k, small.VOCABULARY))
    expected = torch.zeros_like(logits).scatter(0, best.indices, best.values.softmax(0))
    assert (seen[expected == 0] == 0).all()
    torch.testing.assert_close(seen, expected, atol=0.06, rtol=0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tp_degree": 0}, "tp_degree=0 must be a whole number of at least 1"),
        ({"max_context_length": 200}, "max_context_length=200 must be at most seq_len=128"),
        ({"ctx_batch_size": 2}, "ctx_batch_size=2 must be at most batch_size=1"),
        ({"speculation_length": 1}, "speculation_length=1 must be 0"),
        ({"speculation_length": 4, "on_device_sampling": True, "top_k": 5}, "top_k must be 1, got 5"),
        ({"decode_buckets": (64, 100)}, "decode_buckets=[64, 100] must be ascending numbers of tokens, the last of them 128"),
        (
            {"fused_qkv": True, "lora_config": LoraServingConfig()},
            "fused_qkv=True has no separate q_proj, k_proj, v_proj that adapters could be of",
        ),
        ({"context_buckets": (64, 32, 128)}, "context_buckets=[64, 32, 128] must be ascending"),
    ],
)
def test_configurations_that_do_not_fit(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        InferenceConfig(**given)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("is_medusa", "InferenceConfig has no is_medusa: heads that guess ahead are not traced: give a draft model to generate(draft=...)"),
        ("enable_eagle_speculation", "has no enable_eagle_speculation: heads that guess ahead are not traced"),
        ("n_positions", "has no n_positions: say seq_len"),
        ("max_new_tokens", "give it to generate(max_new_tokens=...)"),
        ("padding_side", "prompts are lists, which LanguageModel pads itself"),
        ("no_such_field", "unexpected keyword argument 'no_such_field'"),
    ],
)
def test_fields_of_the_original_that_are_not_here(name: str, words: str) -> None:
    with pytest.raises(TypeError) as error:
        InferenceConfig(**{name: 2})
    assert words in str(error.value)


def test_configurations() -> None:
    found = InferenceConfig(seq_len=600, enable_bucketing=True, max_context_length=256, is_continuous_batching=True, batch_size=4)
    assert (found.context_buckets, found.decode_buckets, found.prompts_at_once) == ((128, 256), (128, 256, 600), 1)
    for given in (found, InferenceConfig(torch_dtype=torch.bfloat16, gqa=GQA.CONVERT_TO_MHA)):
        assert InferenceConfig.from_json(given.to_json()) == given == copy.deepcopy(given) == dataclasses.replace(given)
