"""Tokens that are calls of one program: used where nothing but transformers' own code runs in between, and with the same results."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from tests.torch_bridge.generation.models import generated, on_cpu, on_xla, padded, program_calls, prompt

TOKENS = 24
OPTIONS: dict[str, Any] = {"max_new_tokens": TOKENS, "eos_token_id": None}
"""The first program call comes after the prompt, the warm-up, a look and two recordings, in the first `generate()` of a model."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens were such calls: the length of this list."""
    return program_calls(monkeypatch)


@pytest.fixture(scope="module")
def model() -> Any:
    """A Llama that is played."""
    found = on_xla("llama")
    generated(found, prompt(1, 6), **OPTIONS)
    return found


def used(calls: list[int], texts: int = 1) -> bool:
    """Whether all tokens were such calls but a text's first two, and one or two more in a text that are recorded once more for comparison."""
    return texts * (TOKENS - 2) - 2 <= len(calls) <= texts * (TOKENS - 2)


def check(model: Any, reference: Any, ids: torch.Tensor, **options: Any) -> None:
    expected = generated(reference, ids, **{**OPTIONS, **options})
    torch.testing.assert_close(generated(model, ids, **{**OPTIONS, **options}), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "mixtral"])
def test_greedy_and_sampled(name: str, calls: list[int]) -> None:
    """The text of eager torch, from the second call of the model on with a program call for all tokens but the prompt's and the first."""
    reference, model = on_cpu(name), on_xla(name)
    ids, mask = padded((7, 4))
    check(model, reference, ids, attention_mask=mask)
    calls.clear()
    check(model, reference, ids, attention_mask=mask)
    assert used(calls)
    check(model, reference, ids, attention_mask=mask, do_sample=True, top_k=20)
    assert used(calls, 2)


def test_scores_and_hidden_states(model: Any, calls: list[int]) -> None:
    options = {**OPTIONS, "return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_hidden_states": True}
    ids = prompt(2, 5)
    for _ in range(2):
        calls.clear()
        found = model.generate(ids.to("xla"), do_sample=False, **options)
    expected = on_cpu("llama").generate(ids, do_sample=False, **options)
    assert used(calls) and len(found.scores) == len(found.hidden_states) == TOKENS
    torch.testing.assert_close([x.cpu() for x in found.logits], list(expected.logits))
    torch.testing.assert_close([[x.cpu() for x in of] for of in found.hidden_states], [list(of) for of in expected.hidden_states])
    torch.testing.assert_close(found.cache.layers[1].keys.cpu(), expected.cache.layers[1].keys)


@pytest.mark.parametrize("device", ["xla", "cpu"])
def test_in_inference_mode(model: Any, calls: list[int], device: str) -> None:
    """The prompt may be a tensor of that mode, and what comes back is one."""
    expected = generated(on_cpu("llama"), prompt(1, 6), **OPTIONS)
    with torch.inference_mode():
        ids = prompt(1, 6).to(device)
        mask = torch.ones_like(ids)
        found = model.generate(ids, attention_mask=mask, do_sample=False, **OPTIONS)
        whole = model.generate(ids, attention_mask=mask, do_sample=False, return_dict_in_generate=True, output_scores=True, **OPTIONS)
        assert ids.is_inference() and found.device.type == device and used(calls, 2)
    for t in (found, whole.sequences, *whole.scores):
        assert t.is_inference()
    assert found.tolist() == whole.sequences.tolist() == expected.tolist()


def test_in_inference_mode_with_code_of_the_scripts(model: Any, calls: list[int]) -> None:
    """It stays in that mode."""
    modes: list[bool] = []

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        modes.append(torch.is_inference_mode_enabled())
        return scores

    with torch.inference_mode():
        found = model.generate(prompt(1, 6).to("xla"), do_sample=False, logits_processor=[processor], **OPTIONS)
    assert found.tolist() == generated(on_cpu("llama"), prompt(1, 6), **OPTIONS).tolist()
    assert modes == [True] * TOKENS and not calls


def test_a_streamer_of_transformers(model: Any, calls: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    class Words:
        def decode(self, ids: Any, **options: Any) -> str:
            return " ".join(map(str, torch.as_tensor(ids).reshape(-1).tolist())) + "\n"

    ids = prompt(1, 6)
    expected = generated(on_cpu("llama"), ids, **OPTIONS)[0].tolist()
    generated(model, ids, streamer=transformers.TextStreamer(Words()), **OPTIONS)  # type: ignore[arg-type]
    assert capsys.readouterr().out.split() == list(map(str, expected)) and used(calls)


def test_what_changes_between_two_texts(model: Any, calls: list[int]) -> None:
    """Weights, in place and with other memory, and what Python code reads."""
    ids = prompt(1, 6)
    reference, changed = on_xla("llama").cpu(), on_xla("llama")
    for m in (reference, changed):
        generated(m, ids, **OPTIONS)
    with torch.no_grad():
        for m in (reference, changed):
            m.model.layers[0].mlp.up_proj.weight.mul_(-3)
    check(changed, reference, ids)
    for m in (reference, changed):
        m.lm_head.weight.data = m.lm_head.weight.data.flip(0)
    check(changed, reference, ids)
    assert used(calls[-2 * (TOKENS - 2) :], 2)
    for m in (reference, changed):
        for layer in m.model.layers:
            layer.self_attn.scaling *= 7
    check(changed, reference, ids)


class _Half:
    """A processor that changes a model while it generates."""

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 15:
            self.model.model.layers[1].self_attn.scaling *= 9
        return scores


class _Own(transformers.LlamaForCausalLM):
    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: dict[str, Any], **others: Any) -> dict[str, Any]:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps % 12 == 0:
            self.model.layers[1].self_attn.scaling *= 9
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, **others)


def test_code_of_the_scripts_in_between(calls: list[int]) -> None:
    """What it changes counts from the next token on."""
    ids = prompt(1, 6)
    found = [on_xla("llama").cpu(), on_xla("llama")]
    for m in found:
        generated(m, ids, **OPTIONS)
    calls.clear()
    texts = [generated(m, ids, logits_processor=[_Half(m)], **OPTIONS) for m in found]
    torch.testing.assert_close(*texts, rtol=0, atol=0)
    assert not calls
    for m in found:
        m.__class__ = _Own
    texts = [generated(m, ids, **OPTIONS) for m in found]
    torch.testing.assert_close(*texts, rtol=0, atol=0)
    assert not calls and found[0].steps == found[1].steps


@pytest.fixture
def thread() -> Iterator[None]:
    """One of the script's."""
    ended = threading.Event()
    running = threading.Thread(target=ended.wait)
    running.start()
    yield
    ended.set()
    running.join()


def test_beside_a_thread(model: Any, calls: list[int], thread: None) -> None:
    check(model, on_cpu("llama"), prompt(1, 6))
    assert not calls


def test_with_a_signal_handler(model: Any, calls: list[int]) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        check(model, on_cpu("llama"), prompt(1, 6))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not calls


def test_in_a_thread_beside_the_main_one(model: Any, calls: list[int]) -> None:
    """As transformers' TextIteratorStreamer is used."""
    found: list[torch.Tensor] = []
    running = threading.Thread(target=lambda: found.append(generated(model, prompt(1, 6), **OPTIONS)))
    running.start()
    running.join()
    torch.testing.assert_close(found[0], generated(on_cpu("llama"), prompt(1, 6), **OPTIONS), rtol=0, atol=0)
    assert not calls


def test_hooks_of_the_model(model: Any, calls: list[int]) -> None:
    """They see its inputs where the model is."""
    seen: list[str] = []
    handle = model.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs["input_ids"].device.type), with_kwargs=True)
    try:
        check(model, on_cpu("llama"), prompt(1, 6))
    finally:
        handle.remove()
    assert seen == ["xla"] * TOKENS and not calls
    check(model, on_cpu("llama"), prompt(1, 6))
    assert used(calls)
    assert "prepare_inputs_for_generation" not in vars(model)
