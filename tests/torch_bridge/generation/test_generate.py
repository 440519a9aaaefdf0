"""`generate()` on xla gives the tokens that eager CPU torch gives, and compiles a program for the prompt and one for all tokens after it."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import transformers

from tests.torch_bridge.generation import models
from tests.torch_bridge.generation.models import END, Compiled, generated, on_cpu, on_xla, padded, prompt
from torch_bridge.generation import steps
from torch_bridge.mesh import stacked_arrays
from torch_bridge.passes import fold_repeats
from torch_bridge.replay import player
from torch_bridge.runtime import executor, session


@pytest.mark.core(keep=2)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2", "qwen2"])
def test_greedy(name: str, rows: int) -> None:
    """Also where rows are padded on the left and one ends before the others."""
    ids, mask = padded((7, 4, 6)[:rows])
    plain = generated(on_cpu(name), ids, attention_mask=mask, max_new_tokens=20)
    end = int(plain[0, 7 + 8])  # a token that the first row comes to
    expected = generated(on_cpu(name), ids, attention_mask=mask, max_new_tokens=20, eos_token_id=end)
    assert expected.shape[1] < 27 if rows == 1 else bool((expected[0, -4:] == models.PAD).all())
    torch.testing.assert_close(
        generated(on_xla(name), ids, attention_mask=mask, max_new_tokens=20, eos_token_id=end), expected, rtol=0, atol=0
    )


def test_what_is_compiled_and_drawn_and_played() -> None:
    """40 tokens take two programs; another prompt of that length, sampling and later calls none, other lengths one each. What a token takes is played."""
    reference, model = on_cpu("llama"), on_xla("llama")
    executor.clear_cache()
    executor.sync()

    def both(ids: torch.Tensor, **options: Any) -> int:
        options = {"max_new_tokens": 40, "eos_token_id": 127, **options}
        with Compiled() as compiled:
            found = generated(model, ids, **options)
        torch.testing.assert_close(found, generated(reference, ids, **options), rtol=0, atol=0)
        return compiled.programs

    assert both(prompt(1, 6)) == 2
    state = player.states()[-1]
    assert state.module == "LlamaForCausalLM" and state.played > 20 and not state.reason
    assert both(prompt(1, 6, seed=1)) == 0
    assert both(prompt(1, 6, seed=2), do_sample=True, top_k=20, temperature=0.8) == 0
    assert both(prompt(1, 6, seed=2), do_sample=True, seed=7, top_p=0.9, repetition_penalty=1.3) == 0
    assert both(prompt(1, 9)) == 1 and both(prompt(1, 5, seed=3)) == 1
    assert both(prompt(1, 6), max_new_tokens=3) == 0, "the cache has a length that fits several"
    with torch.no_grad():
        for one in (reference_copy := copy.deepcopy(reference), model):
            one.lm_head.weight.mul_(-1)
    reference = reference_copy
    executor.sync()
    assert both(prompt(1, 6)) == 0, "weights that were changed count, with the same programs"


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_beams(name: str) -> None:
    ids, mask = padded((6, 4))
    reference, model = on_cpu(name), on_xla(name)
    for k, options in enumerate(({}, {"length_penalty": 2.0, "num_return_sequences": 2}, {"do_sample": True, "early_stopping": True})):
        chosen: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 12, "attention_mask": mask, **options}
        expected = generated(reference, ids, **chosen)
        with Compiled() as compiled:
            torch.testing.assert_close(generated(model, ids, **chosen), expected, rtol=0, atol=0)
        assert not k or compiled.programs == 0


@pytest.mark.parametrize("length", [12, 5])
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_sliding_windows(name: str, length: int) -> None:
    """Of 8 tokens, which the prompt or the text after it is longer than: a program while they fill, and one when they are full."""
    ids, mask = padded((length, 4))
    expected = generated(on_cpu(name), ids, attention_mask=mask, max_new_tokens=16)
    model = on_xla(name)
    with Compiled() as compiled:
        torch.testing.assert_close(generated(model, ids, attention_mask=mask, max_new_tokens=16), expected, rtol=0, atol=0)
    assert compiled.programs <= 3


def test_on_the_device_of_the_prompt() -> None:
    model, ids = on_xla("llama"), prompt(1, 6)
    expected = generated(on_cpu("llama"), ids, max_new_tokens=3)
    out = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert out.device.type == "cpu" and out.tolist() == expected.tolist()
    assert model.generate(input_ids=ids.to("xla"), max_new_tokens=3, do_sample=False).device.type == "xla"
    begun = model.generate(max_new_tokens=4, do_sample=False)  # from the begin token
    assert begun.device.type == "xla" and begun.tolist() == on_cpu("llama").generate(max_new_tokens=4, do_sample=False).tolist()


def test_a_configuration_stays_as_it_was() -> None:
    model, ids = on_xla("llama"), prompt(1, 6)
    chosen = transformers.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=END, pad_token_id=models.PAD)
    before = chosen.to_dict()
    found = model.generate(ids.to("xla"), generation_config=chosen)
    assert found.tolist() == on_cpu("llama").generate(ids, generation_config=chosen).tolist() and chosen.to_dict() == before


def test_the_model_is_what_it_was_afterwards() -> None:
    """Its forward, its copies and its files, also after an error inside."""
    model, ids = on_xla("llama"), prompt(1, 6)
    forward, names = model.forward, list(model.state_dict())

    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise OverflowError("from the script")

    generated(model, ids, max_new_tokens=12)
    with pytest.raises(OverflowError, match="from the script"):
        model.generate(ids.to("xla"), logits_processor=[fails], max_new_tokens=3)
    assert model.forward is forward and list(model.state_dict()) == names == list(dict(model.named_parameters()) | {"lm_head.weight": 0})
    kept = model.__dict__[steps._NAME]
    assert kept.of and not copy.deepcopy(model).__dict__[steps._NAME].of
    with torch.no_grad():
        torch.testing.assert_close(model(ids.to("xla")).logits.cpu(), on_cpu("llama")(ids).logits)


def test_several_at_once() -> None:
    """In threads, and inside of each other."""
    model, reference = on_xla("llama"), on_cpu("llama")
    forward, found, inner = model.forward, {}, []

    def run(seed: int) -> None:
        found[seed] = generated(model, prompt(1, 6, seed), max_new_tokens=14).tolist()

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {seed: generated(reference, prompt(1, 6, seed), max_new_tokens=14).tolist() for seed in (1, 2)}
    assert model.forward is forward

    def asks(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        inner.append(generated(model, prompt(1, 6, 1), max_new_tokens=14).tolist())
        return scores

    outer = generated(model, prompt(1, 6, 2), max_new_tokens=14, logits_processor=[asks])
    assert outer.tolist() == found[2] and inner == [found[1]] * (outer.shape[1] - 6) and model.forward is forward


def test_a_forward_of_the_instance_is_called() -> None:
    """As accelerate puts one there; nothing is played then."""
    model, ids, calls = on_xla("llama"), prompt(1, 6), []
    inner = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["input_ids"].shape[1])
        return inner(*args, **kwargs)

    forward.__wrapped__ = inner  # type: ignore[attr-defined]
    model.forward = forward
    assert generated(model, ids, max_new_tokens=4).tolist() == generated(on_cpu("llama"), ids, max_new_tokens=4).tolist()
    assert calls == [6, 1, 1, 1] and model.forward is forward


def test_without_playing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_REPLAY", "0")
    model, ids = on_xla("llama"), prompt(1, 6)
    assert generated(model, ids, max_new_tokens=20).tolist() == generated(on_cpu("llama"), ids, max_new_tokens=20).tolist()
    assert steps._NAME not in model.__dict__


def test_a_model_that_is_let_go_of() -> None:
    """Nothing that it keeps for later calls keeps it alive until Python looks for circles."""
    model = on_xla("llama")
    generated(model, prompt(1, 6), max_new_tokens=20)
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_many_layers_are_no_loop() -> None:
    """In a loop a token would copy all weights out of a stack; a forward before has left them in one."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=models.WORDS, n_embd=16, n_layer=12, n_head=2, bos_token_id=2, eos_token_id=None, initializer_range=0.2
    )
    reference = transformers.GPT2LMHeadModel(config).eval()
    model, ids = copy.deepcopy(reference).to("xla"), prompt(1, 6)
    weight: Any = model.transformer.h[3].mlp.c_fc.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(ids.to("xla"), labels=ids.to("xla")).loss.backward()
    optimizer.step()
    executor.sync()
    assert isinstance(weight._storage.held, stacked_arrays.Row)
    assert generated(model, ids, max_new_tokens=4).tolist() == generated(reference, ids, max_new_tokens=4).tolist()
    assert not isinstance(weight._storage.held, stacked_arrays.Row)
    assert all(program.spec.plan is None for program in list(session.current().recent)[-3:])
    assert fold_repeats.least() == fold_repeats.LEAST, "afterwards as before"
