"""`nxd-generate`: what it writes, and what it says of what it cannot do."""

from __future__ import annotations

import copy
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from nxd_jax.inference import InferenceConfig, LanguageModel, command, generate
from nxd_jax.inference.generation import Made
from nxd_jax.inference.printing import Printer
from nxd_jax.quantization import KVQuantizationConfig
from tests.nxd_jax.inference import adapters, small
from tests.nxd_jax.training.data import corpus

ROOT = Path(__file__).resolve().parents[3]
TEXTS = ("Once upon a time", "The end")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights and a tokenizer."""
    place = tmp_path_factory.mktemp("model")
    tokenizer = corpus.tokenizer()
    small.folder(place, "llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(place)
    return place


def expected(folder: Path, texts: tuple[str, ...], new: int) -> list[str]:
    """transformers' answers."""
    tokenizer = corpus.tokenizer()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    found = small.answers(model, prompts, 128, new, tokenizer.eos_token_id)
    return [tokenizer.decode(answer, skip_special_tokens=True) for answer in found]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = command.main(list(words))
    found = capsys.readouterr()
    return status, found.out, found.err


def test_one_text_and_its_speed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, str(folder), "--tp", "2", TEXTS[0], "--max-new-tokens", "12")
    assert (status, out) == (0, expected(folder, TEXTS[:1], 12)[0] + "\n")
    assert re.search(r"^nxd-generate: llama on 2 ranks is ready after [\d.]+ s$", err, re.MULTILINE)
    speed = r"^nxd-generate: \d+ tokens read, the first answered after [\d.]+ s; 12 tokens made in [\d.]+ s, [\d.]+ tokens/s$"
    assert re.search(speed, err, re.MULTILINE)


@pytest.mark.core(keep=0)
@pytest.mark.parametrize("draft", [False, True])
def test_several_texts(folder: Path, draft: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them from stdin; with a draft (here the model itself) the same."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(TEXTS[1]))
    more = ["--draft", str(folder), "--speculation-length", "3"] if draft else []
    status, out, _ = run(capsys, str(folder), TEXTS[0], "-", "--max-new-tokens", "9", *more)
    first, second = expected(folder, TEXTS, 9)
    assert (status, out) == (0, f"[{TEXTS[0]}]\n{first}\n[-]\n{second}\n")


@pytest.mark.core(keep=0)
def test_a_file_and_draws(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--save, with a text or without; the file needs neither the folder nor its tokenizer, and has logits to draw by."""
    file = str(tmp_path / "llama.pt")
    status, out, err = run(capsys, str(folder), "--tp", "2", "--seq-len", "64", "--max-new-tokens", "10", "--save", file)
    assert (status, out) == (0, "") and f"{file}: " in err
    status, out, _ = run(capsys, file, TEXTS[0], "--max-new-tokens", "10")
    assert (status, out) == (0, expected(folder, TEXTS[:1], 10)[0] + "\n")
    drawn = [run(capsys, file, TEXTS[0], "--max-new-tokens", "10", "--temperature", "1", "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]
    status, _, err = run(capsys, file, TEXTS[0], "--tp", "4", "--seq-len", "100")
    assert status == 2 and f"{file} is traced already, and --tp, --seq-len would need another trace: give the Hugging Face folder" in err
    status, _, err = run(capsys, file, TEXTS[0] * 20)
    assert status == 2 and "and the model was traced for 64 (max_context_length; seq_len 64)" in err


def test_what_cannot_be_done(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare, other, broken = tmp_path / "bare", tmp_path / "other", tmp_path / "broken"
    for place, content in ((bare, '{"model_type": "llama"}'), (other, '{"model_type": "bert"}'), (broken, "{")):
        place.mkdir()
        (place / "config.json").write_text(content)
        if place is not bare:
            corpus.tokenizer().save_pretrained(place)
    empty = tmp_path / "empty"
    empty.mkdir()
    model, text = str(folder), TEXTS[0]
    for words, said in (
        ([model], "there is nothing to do: give a text to go on from, or --save FILE"),
        ([str(tmp_path / "none"), text], "none does not exist: give a Hugging Face folder"),
        ([str(empty), text, "--tokenizer", model], "empty is no Hugging Face model: there is no config.json"),
        ([str(bare), text], "bare has no tokenizer (tokenizer.json or the like): name one with --tokenizer"),
        ([str(bare), text, "--tokenizer", model], "bare"),
        ([str(other), text], "model_type is 'bert', and must be one of gpt2, llama, mistral, mixtral, qwen2"),
        ([str(broken), text], "config.json is no JSON"),
        ([model, text, "--lora", "poet"], "--lora takes NAME=FOLDER, each with a name of its own, got poet"),
        (
            [model, text, "--lora", "a=x", "--lora", "b=x"],
            "there are adapters a, b: say which one answers with --adapter NAME (- for none)",
        ),
        ([model, text, "--lora", "a=x", "--adapter", "b"], "--adapter b is none of a: load it with --lora b=FOLDER"),
        ([model, text, text, text, "--lora", "a=x", "--adapter", "a", "--adapter", "-"], "--adapter is given 2 times for 3 texts"),
        ([model, text, "--lora", "a=nowhere"], "nowhere is no folder of PEFT: there is no adapter_config.json"),
        ([model, text, "--chat"], "the tokenizer has no chat template: leave --chat out"),
        ([model, text * 30], "the longest text has"),
        (
            [model, text, "--max-new-tokens", "200"],
            "more than the model's 128 positions (max_position_embeddings): shorten it, or ask for fewer",
        ),
        ([model, text, "--seq-len", "16", "--max-new-tokens", "15"], "that is more than --seq-len 16: raise it, or ask for fewer"),
        ([model, text, "--seq-len", "256"], "--seq-len 256 is more than the model's 128 positions (max_position_embeddings)"),
        ([model, text, "--tp", "0"], "--tp must be at least 1, got 0"),
        ([model, text, "--ep", "0"], "--ep must be at least 1, got 0"),
        ([model, text, "--ep", "2", "--max-new-tokens", "4"], "ep_degree=2 shares out experts, and a llama model has none"),
        ([model, text, "--draft", model, "--temperature", "1"], "--draft goes with the likeliest tokens only: leave --temperature out"),
        ([model, text, "--speculation-length", "3"], "--speculation-length is about --draft: give both"),
        ([model, text, "--draft", model, "--save", "x"], "--save writes one model, and --draft is another: save without it"),
        ([model, text, "--temperature", "-1"], "temperature=-1.0"),
    ):
        status, out, err = run(capsys, *words)
        assert (status, out) == (2, "") and said in err and err.startswith("nxd-generate: "), (words, err)


@pytest.mark.core(keep=0)
def test_gpt2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Six heads on four ranks; texts of other lengths."""
    tokenizer = corpus.tokenizer()
    sizes = {"num_attention_heads": 6, "hidden_size": 96}
    small.folder(tmp_path, "gpt2", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes)
    tokenizer.save_pretrained(tmp_path)
    status, out, err = run(capsys, str(tmp_path), *TEXTS, "--tp", "4", "--max-new-tokens", "9")
    first, second = expected(tmp_path, TEXTS, 9)
    assert (status, out) == (0, f"[{TEXTS[0]}]\n{first}\n[{TEXTS[1]}]\n{second}\n") and "gpt2 on 4 ranks is ready" in err


@pytest.mark.core(keep=0)
def test_a_quantized_cache(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, str(folder), TEXTS[0], "--kv-dtype", "float8_e4m3", "--max-new-tokens", "9")
    tokenizer, options = corpus.tokenizer(), InferenceConfig(kv_quant_config=KVQuantizationConfig())
    model = LanguageModel.from_pretrained(folder, options)
    (answer,) = generate(model, [tokenizer(TEXTS[0])["input_ids"]], 9)
    assert (status, out) == (0, tokenizer.decode(answer, skip_special_tokens=True) + "\n")
    assert out != expected(folder, TEXTS[:1], 9)[0] + "\n"


@pytest.mark.core(keep=0)
def test_quantized_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, str(folder), TEXTS[0], "--quantize", "int8", "--max-new-tokens", "4")
    options = InferenceConfig(seq_len=128, quantized=True, quantization_type="per_channel_symmetric")
    tokenizer, model = corpus.tokenizer(), LanguageModel.from_pretrained(folder, options)
    (answer,) = generate(model, [tokenizer(TEXTS[0])["input_ids"]], 4)
    assert (status, out) == (0, tokenizer.decode(answer, skip_special_tokens=True) + "\n")
    assert {str(t.dtype) for n, t in model.nxd_model.weights[0].items() if n.endswith("q_proj.weight")} == {"torch.int8"}


def test_names_of_quantized_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that `InferenceConfig` takes."""
    found = command.parser().parse_args(["model", "--quantize", "float8_e4m3fn", "--kv-dtype", "F8E5M2"])
    assert (found.quantize, found.kv_dtype) == ("f8e4m3", "f8e5m2")
    for words, said in (
        (
            ("--quantize", "int4"),
            "argument --quantize: 'int4' must be one of int8, f8e4m3, f8e4m3fn, float8_e4m3, float8_e4m3fn, f8e5m2, float8_e5m2",
        ),
        (
            ("--kv-dtype", "int8"),
            "argument --kv-dtype: 'int8' must be one of f8e4m3, f8e4m3fn, float8_e4m3, float8_e4m3fn, f8e5m2, float8_e5m2",
        ),
    ):
        with pytest.raises(SystemExit, match="2"):
            command.main(["model", "text", *words])
        assert said in capsys.readouterr().err


@pytest.mark.core(keep=0)
def test_adapters(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One for each text; the file that is saved has them, and takes another."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    places = [adapters.write(theirs, tmp_path / str(k), k, ("q_proj", "up_proj")) for k in (1, 2, 3)]
    said = []
    for k, place in enumerate(places):
        adapters.merged(theirs, place).save_pretrained(tmp_path / f"merged_{k}")
        said.append(expected(tmp_path / f"merged_{k}", TEXTS[:1], 6)[0])
    plain, file = expected(folder, TEXTS[:1], 6)[0], str(tmp_path / "llama.pt")
    lora = ["--lora", f"a={places[0]}", "--lora", f"b={places[1]}"]
    words = [TEXTS[0], TEXTS[0], TEXTS[0], "--max-new-tokens", "6"]
    chosen = ["--adapter", "b", "--adapter", "-", "--adapter", "a"]
    status, out, err = run(capsys, str(folder), *words, "--tp", "2", *lora, *chosen, "--save", file)
    shown = [f"[{TEXTS[0]}]\n{answer}\n" for answer in (said[1], plain, said[0])]
    assert (status, out) == (0, "".join(shown)), err
    status, out, _ = run(capsys, file, TEXTS[0], "--max-new-tokens", "6", "--adapter", "b")
    assert (status, out) == (0, said[1] + "\n")
    status, out, _ = run(capsys, file, TEXTS[0], "--max-new-tokens", "6", "--lora", f"b={places[2]}")
    assert (status, out) == (0, said[2] + "\n")
    status, _, err = run(capsys, file, TEXTS[0], "--adapter", "c")
    assert status == 2 and "no adapter is named 'c': there are a, b" in err


def test_missing_weights(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    status, _, err = run(capsys, str(tmp_path), TEXTS[0], "--max-new-tokens", "4")
    assert status == 2 and "the model's files have no model.embed_tokens.weight, " in err and "more" in err


def test_chat_templates(folder: Path) -> None:
    tokenizer = copy.deepcopy(corpus.tokenizer())
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
    args = command.parser().parse_intermixed_args([str(folder), "Why?", "--chat"])
    assert tokenizer.decode(command._ids(tokenizer, "Why?", args)) == "<user>Why?<answer>"


def test_answers_in_their_order() -> None:
    """The second answer is complete before the first one."""
    out, tokenizer = io.StringIO(), corpus.tokenizer()
    printer = Printer(out, tokenizer, ["a", "b"])
    first, second = tokenizer("one two", add_special_tokens=False)["input_ids"], tokenizer("x", add_special_tokens=False)["input_ids"]
    for token in second:
        printer.add(Made(1, token, False))
    printer.add(Made(1, None, True))
    assert out.getvalue() == "[a]\n"
    for k, token in enumerate(first):
        printer.add(Made(0, token, k == len(first) - 1))
    assert out.getvalue() == "[a]\none two\n[b]\nx\n"


def test_the_command_starts(folder: Path) -> None:
    """As a user starts it; --help names what there is."""
    done = subprocess.run(
        [sys.executable, "-m", "nxd_jax.inference.command", str(folder), TEXTS[1], "--tp", "4", "--max-new-tokens", "5"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected(folder, TEXTS[1:], 5)[0] + "\n"
    shown: Any = command.parser().format_help()
    assert all(word in shown for word in ("--save", "--tp", "--draft", json.dumps("Once upon a time")))
