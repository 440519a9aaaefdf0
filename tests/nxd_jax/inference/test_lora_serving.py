"""Several adapters at once: each row's tokens are those of transformers' model with that adapter merged by PEFT."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nxd_jax.inference import CausalLM, InferenceConfig, LanguageModel, LoraServingConfig, generation, model_files
from tests.nxd_jax.inference import adapters, small
from tests.nxd_jax.inference.test_generation import compilations

NEVER = 10**6
SIZES: dict[str, Any] = {"batch_size": 3, "seq_len": 24, "max_context_length": 12}


def expected(theirs: Any, prompts: Sequence[Sequence[int]], folders: Sequence[Path | None], new: int = 6) -> list[list[int]]:
    """One prompt at a time, each with its adapter."""
    return [
        small.answers(adapters.merged(theirs, place), [ids], 24, new, end=NEVER)[0] for ids, place in zip(prompts, folders, strict=True)
    ]


class Served:
    """A Llama on two ranks with two adapters, one of another rank and of fewer layers, beside three lines."""

    def __init__(self, place: Path):
        self.theirs = small.folder(place / "model", "llama")
        self.all = adapters.write(self.theirs, place / "all", 1)
        self.some = adapters.write(self.theirs, place / "some", 2, ("q_proj", "v_proj"), 3, use_rslora=True, alpha_pattern={"v_proj": 5})
        self.third = adapters.write(self.theirs, place / "third", 3, ("k_proj", "o_proj", "down_proj"), 2, rank_pattern={"o_proj": 1})
        room = LoraServingConfig(max_loras=2, max_lora_rank=4, lora_ckpt_paths={"all": str(self.all), "some": str(self.some)})
        options = InferenceConfig(tp_degree=2, speculation_length=3, lora_config=room, **SIZES)
        self.model = LanguageModel.from_pretrained(place / "model", options)

    def check(self, names: Sequence[str | None], folders: Sequence[Path | None]) -> None:
        prompts = small.prompts([5, 3, 9, 7][: len(names)])
        assert generation.generate(self.model, prompts, 6, end=[NEVER], adapters=names) == expected(self.theirs, prompts, folders)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("served"))


def test_each_row_has_its_own(served: Served) -> None:
    """More prompts than lines; and logits, which tokens might hide."""
    assert served.model.adapters == ("all", "some")
    served.check(["some", None, "all", "all"], [served.some, None, served.all, served.all])
    prompts = small.prompts([6, 6, 6], seed=4)
    found = served.model.prefill(prompts, [2, 0, 1], ["all", "some", None])
    models = [adapters.merged(served.theirs, place) for place in (served.all, served.some, None)]
    assert torch.stack([small.logits(m, prompts[0])[-1] for m in models]).std(0).min() > 1e-3
    close(found, [small.logits(m, ids)[-1] for m, ids in zip(models, prompts, strict=True)])
    found = served.model.decode([3, 4, 5], [6, 6, 6])
    rows = [(models[1], [*prompts[1], 3]), (models[2], [*prompts[2], 4]), (models[0], [*prompts[0], 5])]
    close(found, [small.logits(m, ids)[-1] for m, ids in rows])


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("tp", [2, 1])
def test_bfloat16(tp: int, tmp_path: Path) -> None:
    """Adapters stay float32, as PEFT's do: logits are as near to those of float32 as PEFT's are."""
    theirs = small.model("llama").bfloat16()
    theirs.save_pretrained(tmp_path / "model")
    place = adapters.write(theirs.float(), tmp_path / "all", 1)
    exact, rounded = (adapters.beside(copy.deepcopy(theirs).to(dtype), place) for dtype in (torch.float32, torch.bfloat16))
    room = LoraServingConfig(lora_ckpt_paths={"all": str(place)})
    options = InferenceConfig(tp_degree=tp, torch_dtype=torch.bfloat16, lora_config=room, **SIZES)
    model = LanguageModel.from_pretrained(tmp_path / "model", options)
    weights = model.nxd_model.weights[0]
    assert {str(t.dtype) for n, t in weights.items() if "q_proj" in n and ".lora_" in n} == {"torch.float32"}
    assert weights["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    prompts = small.prompts([9, 9, 9])
    found = model.prefill(prompts, [0, 1, 2], ["all"] * 3)
    expected, theirs_are = (torch.stack([small.logits(one, ids)[-1].float() for ids in prompts]) for one in (exact, rounded))
    off, theirs_off = float((found - expected).norm()), float((theirs_are - expected).norm())
    assert 0 < off < 1.5 * theirs_off, off / theirs_off


def test_guesses_are_checked_with_the_adapter(served: Served) -> None:
    prompts, folders = small.prompts([5, 3]), [served.all, None]
    found = generation.generate(served.model, prompts, 6, end=[NEVER], draft=served.model, adapters=["all", None])
    assert found == expected(served.theirs, prompts, folders)


def test_adapters_come_and_go(served: Served) -> None:
    """Nothing is compiled, and what an adapter before had in a slot is gone."""
    model, compiled = served.model, compilations()
    before = len(compiled)
    model.load_adapter("all", served.third)
    served.check(["all", None, "some"], [served.third, None, served.some])
    model.unload_adapter("some")
    assert model.adapters == ("all",)
    model.load_adapter("new", served.all)
    served.check(["new", "all", None], [served.all, served.third, None])
    assert len(compiled) == before
    model.unload_adapter("new")
    model.load_adapter("some", served.some)
    model.load_adapter("all", served.all)


def test_what_is_not_there(served: Served, tmp_path: Path) -> None:
    """All is said before anything changes."""
    model, (prompt,) = served.model, small.prompts([4])
    with pytest.raises(ValueError, match=r"no adapter is named 'none': there are all, some; load_adapter\(name, folder\) loads one"):
        generation.stream(model, [prompt], adapters=["none"])
    with pytest.raises(ValueError, match="1 adapters for 2 prompts: name one for each, None for those without"):
        model.prefill([prompt] * 2, [0, 1], ["all"])
    with pytest.raises(ValueError, match=r"no adapter is named 'none'"):
        model.unload_adapter("none")
    with pytest.raises(
        ValueError, match=re.escape("there is no room for adapter 'third' beside all, some (max_loras=2): unload_adapter(name) one")
    ):
        model.load_adapter("third", served.third)
    large = adapters.write(served.theirs, tmp_path / "large", 1, r=5)
    with pytest.raises(ValueError, match=r"large has rank 5, and the model was traced for max_lora_rank=4: trace it for more"):
        model.load_adapter("all", large)
    wide = adapters.write(small.model("llama", intermediate_size=96), tmp_path / "wide", 1, ("up_proj",))
    words = "wide is of another base model: its up_proj of layer 0 has 64 inputs and 96 outputs, and this model has 2 layers, whose up_proj has 64 and 90"
    with pytest.raises(ValueError, match=words):
        model.load_adapter("all", wide)
    deep = adapters.write(small.model("llama", num_hidden_layers=3), tmp_path / "deep", 1, ("q_proj",))
    with pytest.raises(ValueError, match="deep is of another base model: its q_proj of layer 2 has 64 inputs"):
        model.load_adapter("all", deep)
    stream = generation.stream(model, [prompt], 3, end=[NEVER], adapters=["all"])
    next(stream)
    with pytest.raises(RuntimeError, match="the model is making other texts, whose lines of the KV cache or adapters this would overwrite"):
        model.load_adapter("all", served.third)
    stream.close()
    model.prefill([prompt] * 2, [0, 1], ["all", None])
    model.load_adapter("all", served.all)
    assert model.decode([3, 3, 3], [4, 4, 4], [1]).shape == (3, small.VOCABULARY)
    with pytest.raises(ValueError, match="the adapter that line 0 was read with is not loaded any more: read its text again"):
        model.decode([3, 3, 3], [4, 4, 4], [0, 1])
    served.check([None, "all"], [None, served.all])


def test_folders_that_cannot_be_served(served: Served, tmp_path: Path) -> None:
    model = served.model
    with pytest.raises(FileNotFoundError, match=r"nowhere is no folder of PEFT: there is no adapter_config.json"):
        model.load_adapter("new", tmp_path / "nowhere")
    heads = adapters.write(served.theirs, tmp_path / "heads", 1, ("q_proj", "lm_head"))
    with pytest.raises(ValueError, match=r"heads has lm_head.*: only LoRA of q_proj, .* can be served; merge"):
        model.load_adapter("new", heads)
    dora = adapters.write(served.theirs, tmp_path / "dora", 1, ("q_proj",), use_dora=True)
    with pytest.raises(ValueError, match=r"dora: the PEFT adapters use use_dora, which LoRA layers here do not have: merge them in PEFT"):
        model.load_adapter("new", dora)
    for given, words in (
        (
            {"init_lora_weights": "pissa"},
            "dora: the PEFT adapters have init_lora_weights='pissa', a start that changes the base model's weights, too",
        ),
        ({"alora_invocation_tokens": [1]}, "dora: the PEFT adapters use alora_invocation_tokens, which LoRA layers here do not have"),
    ):
        config = json.loads((dora / "adapter_config.json").read_text()) | {"use_dora": False} | given
        (dora / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=words):
            model.load_adapter("new", dora)
    half = adapters.write(served.theirs, tmp_path / "half", 1, ("q_proj",)) / "adapter_model.safetensors"
    tensors = load_file(half)
    del tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
    for given, words in (
        (tensors, "half needs lora_A and lora_B of one rank for model.layers.1.self_attn.q_proj"),
        ({}, "half is empty: only LoRA of q_proj"),
    ):
        save_file(given, half)
        with pytest.raises(ValueError, match=words):
            model.load_adapter("new", half.parent)
    assert model.adapters == ("all", "some")


@pytest.mark.core(keep=0)
@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("kind", "tp", "changes"),
    [
        ("qwen2", 4, {"num_attention_heads": 6, "hidden_size": 96}),
        ("mistral", 4, {}),
        ("llama", 1, {"mlp_bias": True, "attention_bias": True}),
        ("llama", 2, {"num_attention_heads": 6, "hidden_size": 96, "num_key_value_heads": 3}),
        ("qwen2", 2, {}),
    ],
)
def test_models_and_ranks(kind: str, tp: int, changes: dict[str, Any], tmp_path: Path) -> None:
    """With heads that ranks do not divide; from a file, too, which takes other adapters as well."""
    theirs = small.folder(tmp_path / "model", kind, **changes)
    first, second = (adapters.write(theirs, tmp_path / str(k), k) for k in (1, 2))
    room = LoraServingConfig.of_folders({"first": str(first)}, room=1)
    assert (room.max_loras, room.max_lora_rank, room.target_modules) == (2, 4, LoraServingConfig().target_modules)
    model = LanguageModel.from_pretrained(tmp_path / "model", InferenceConfig(tp_degree=tp, lora_config=room, **SIZES))
    prompts = small.prompts([5, 7, 4])
    answers = expected(theirs, prompts, [first, None, second])
    model.load_adapter("second", second)
    assert generation.generate(model, prompts, 6, end=[NEVER], adapters=["first", None, "second"]) == answers
    model_files.save(model, tmp_path / "model.pt")
    again = model_files.load(tmp_path / "model.pt")
    assert (again.options, again.adapters) == (model.options, ("first", "second"))
    assert generation.generate(again, prompts, 6, end=[NEVER], adapters=["first", None, "second"]) == answers
    again.load_adapter("first", second)
    again.load_adapter("second", first)
    assert generation.generate(again, prompts, 6, end=[NEVER], adapters=["second", None, "first"]) == answers


@pytest.mark.core(keep=0)
def test_beside_other_options(tmp_path: Path) -> None:
    """A fused Wqkv, which has no adapters itself, and ranks that share out a K/V head's cache."""
    theirs = small.folder(tmp_path / "model", "llama")
    place = adapters.write(theirs, tmp_path / "one", 1, ("o_proj", "up_proj", "down_proj"))
    more: dict[str, Any] = {"fused_qkv": True, "flash_decoding_enabled": True, "is_continuous_batching": True}
    options = InferenceConfig(tp_degree=4, lora_config=LoraServingConfig.of_folders({"one": str(place)}), **more, **SIZES)
    model = LanguageModel.from_pretrained(tmp_path / "model", options)
    prompts = small.prompts([5, 3, 9, 7])
    found = generation.generate(model, prompts, 6, end=[NEVER], adapters=["one", None, None, "one"])
    assert found == expected(theirs, prompts, [place, None, None, place])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_loras": 0}, "max_loras=0 must be a whole number of at least 1"),
        ({"max_lora_rank": True}, "max_lora_rank=True must be a whole number of at least 1"),
        ({"target_modules": ("q_proj", "lm_head")}, "target_modules=['q_proj', 'lm_head'] must be some of q_proj, k_proj"),
        ({"lora_ckpt_paths": {"a": "a", "b": "b"}}, "2 lora_ckpt_paths are more than max_loras=1: raise it"),
    ],
)
def test_configurations_that_do_not_fit(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        LoraServingConfig(**given)
    assert words in str(error.value)


def test_models_without_room(nxd: Any) -> None:
    nxd(1)
    with pytest.raises(TypeError, match="lora_config must be a LoraServingConfig or None, got dict"):
        InferenceConfig(lora_config={"max_loras": 2})  # type: ignore[arg-type]
    options, ids = InferenceConfig(lora_config=LoraServingConfig()), torch.zeros(1, 1, dtype=torch.int64)
    assert InferenceConfig.from_json(options.to_json()) == options
    for kind in ("gpt2", "mixtral"):
        with pytest.raises(
            NotImplementedError, match=f"LoRA adapters cannot be served for model_type '{kind}', only for llama, mistral, qwen2: merge"
        ):
            CausalLM(small.model(kind).config, options, device="meta")
    plain = CausalLM(small.model("llama").config, InferenceConfig(), device="meta")
    with pytest.raises(ValueError, match="adapter_ids are for a model with room for adapters"):
        plain(ids, position_ids=ids[0], adapter_ids=ids[0])


def close(found: torch.Tensor, logits: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found, torch.stack(logits), atol=2e-4, rtol=2e-4)
