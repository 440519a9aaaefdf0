"""What `data.tokenizer` names."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Tokenizer

from nxd_jax.training.data.megatron import tokenizers
from tests.nxd_jax.training.data import corpus

TEXT = "A text's words, 12 of them: <|endoftext|> and  more.\n\u00e9\u4e2d"


def gpt2_files(folder: Path, size: int = 300, special: bool = True) -> dict[str, str]:
    """vocab.json and merges.txt of a small GPT-2 tokenizer."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens = [tokenizers.GPT2_END] if special else []
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        corpus.TEXTS, trainers.BpeTrainer(vocab_size=size, special_tokens=tokens, initial_alphabet=alphabet, show_progress=False)
    )
    made.model.save(str(folder))
    return {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}


@pytest.mark.parametrize("special", [True, False])
def test_gpt2_is_that_of_transformers(special: bool, tmp_path: Path) -> None:
    files = gpt2_files(tmp_path, special=special)
    made = tokenizers.load({"library": "megatron", "type": "GPT2BPETokenizer", "model": None, **files})
    reference = GPT2Tokenizer(vocab=files["vocab_file"], merges=files["merge_file"])
    assert made.vocab_size == len(reference) == (300 if special else 301)
    assert made.eos_id == reference.eos_token_id == (0 if special else 300)
    for text in (*corpus.TEXTS, TEXT, ""):
        assert made.text_to_ids(text) == reference.convert_tokens_to_ids(reference.tokenize(text))
    assert made.ids_to_text(made.text_to_ids(TEXT)) == TEXT
    assert made.ids_to_text([*made.text_to_ids("A"), 9999]) == "A"


def test_transformers(tmp_path: Path) -> None:
    corpus.tokenizer(add_bos=True).save_pretrained(str(tmp_path))
    for section in (
        str(tmp_path),
        {"library": "huggingface", "type": str(tmp_path), "model": None, "use_fast": False, "sentencepiece_legacy": False},
    ):
        made = tokenizers.load(section)
        assert (made.vocab_size, made.bos_id, made.eos_id) == (256, 0, 1)
        assert made.encode(corpus.TEXTS) == corpus.tokenizer()(corpus.TEXTS)["input_ids"]  # no begin of text
        assert made.ids_to_text(made.text_to_ids("abc")) == "abc"


def test_an_end_of_text_by_its_other_name(tmp_path: Path) -> None:
    made = corpus.tokenizer()
    made.save_pretrained(str(tmp_path))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["eos_token"], config["bos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert tokenizers.load(str(tmp_path)).eos_id is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "sep_token": "</s>", "cls_token": "<s>"}))
    found = tokenizers.load(str(tmp_path))
    assert (found.bos_id, found.eos_id) == (0, 1)


def test_sentencepiece(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    (tmp_path / "text").write_text("\n".join(corpus.TEXTS))
    sentencepiece.SentencePieceTrainer.train(input=str(tmp_path / "text"), model_prefix=str(tmp_path / "m"), vocab_size=64, minloglevel=2)
    for section in ({"library": "sentencepiece"}, {"library": "megatron", "type": "Llama2Tokenizer"}):
        made = tokenizers.load({**section, "model": str(tmp_path / "m.model"), "sentencepiece_legacy": True})
        reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
        assert (made.vocab_size, made.bos_id, made.eos_id) == (64, 1, 2)
        assert made.encode(["Line 3", "of a text"]) == [reference.encode("Line 3"), reference.encode("of a text")]
        assert made.ids_to_text(made.text_to_ids("Line 3")) == "Line 3"
    (tmp_path / "bad").write_text("no model")
    with pytest.raises(ValueError, match="data.tokenizer.model=.*bad is no model of sentencepiece"):
        tokenizers.load({"library": "sentencepiece", "model": str(tmp_path / "bad")})


def test_without_sentencepiece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "m.model").touch()
    with pytest.raises(
        ValueError, match="data.tokenizer.model=.*m.model needs the library sentencepiece, which is not installed: pip install"
    ):
        tokenizers.load({"library": "sentencepiece", "model": str(tmp_path / "m.model")})


GPT2: dict[str, Any] = {"library": "megatron", "type": "GPT2BPETokenizer"}
ERRORS: dict[str, tuple[Any, str]] = {
    "none": (None, "data.tokenizer is missing: the size of the vocabulary and the end of documents come from it"),
    "library": ({"library": "fast"}, "data.tokenizer.library=fast is not known: it must be megatron, huggingface or sentencepiece"),
    "no library": ({}, "data.tokenizer.library=None is not known"),
    "other library": ({"library": "tabular", "delimiter": ","}, "library=tabular is one of NeMo's, and not supported: it must be megatron"),
    "type": ({"library": "megatron", "type": "BertWordPieceCase"}, "type=BertWordPieceCase: with library megatron it must be GPT2BPETokenizer"),
    "no type": ({"library": "huggingface"}, "data.tokenizer.type is missing: with library huggingface it is a tokenizer's folder"),
    "other files": ({"library": "huggingface", "type": "gpt2", "vocab_file": "v"}, "data.tokenizer.vocab_file=v: with library huggingface all files"),
    "no vocabulary": (GPT2, "data.tokenizer.vocab_file is missing: library megatron needs it"),
    "no merges": ({**GPT2, "vocab_file": __file__}, "data.tokenizer.merge_file is missing"),
    "no files": ({**GPT2, "vocab_file": __file__, "merge_file": __file__}, "are no vocabulary and merges of a GPT-2 tokenizer"),
    "no model": ({"library": "sentencepiece", "type": "x"}, "data.tokenizer.model is missing: library sentencepiece needs it"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be(name: str) -> None:
    section, said = ERRORS[name]
    with pytest.raises(ValueError, match=said):
        tokenizers.load(section)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="data.tokenizer.vocab_file: there is no file /nothing"):
        tokenizers.load({**GPT2, "vocab_file": "/nothing", "merge_file": "/nothing"})
    with pytest.raises(FileNotFoundError, match="data.tokenizer.type: there is no /nothing"):
        tokenizers.load({"library": "huggingface", "type": "/nothing"})
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ValueError, match="it must map tokens to ids"):
        tokenizers.load({**GPT2, "vocab_file": str(tmp_path / "list.json"), "merge_file": __file__})
