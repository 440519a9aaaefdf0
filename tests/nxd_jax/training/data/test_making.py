"""Sets and tokenizers that are made of text."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pytest

from nxd_jax.training.data import blocks, making, tokenizing
from tests.nxd_jax.training.data import corpus


@pytest.mark.parametrize("add_bos", [False, True])
def test_rows_are_those_of_a_plain_reference(add_bos: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "TEXTS", 7)  # batches of texts leave nothing out between them
    wanted = corpus.reference(corpus.TEXTS, 48, add_bos)
    tokens = sum(len(corpus.tokenizer(add_bos)(t)["input_ids"]) for t in corpus.TEXTS)
    made = making.make(corpus.TEXTS, corpus.tokenizer(add_bos), 48, tmp_path / "set")
    assert (made.rows, made.tokens, made.left_over, made.documents) == (len(wanted), tokens, tokens % 48, 40)
    data = datasets.load_from_disk(str(tmp_path / "set"))
    assert data["input_ids"][:] == wanted and data["labels"][:] == wanted
    assert data["attention_mask"][:] == [[1] * 48] * len(wanted)
    assert data.features == making.features()
    assert os.listdir(tmp_path) == ["set"]


def test_nothing_half_written_looks_whole(tmp_path: Path) -> None:
    def breaks() -> Iterator[str]:
        yield from corpus.TEXTS
        raise OSError("the disk is full")

    making.make(corpus.TEXTS, corpus.tokenizer(), 48, tmp_path / "set")
    with pytest.raises(FileExistsError, match="set is there already; choose another folder, or pass --overwrite"):
        making.make(corpus.TEXTS, corpus.tokenizer(), 24, tmp_path / "set")
    with pytest.raises(OSError, match="the disk is full"):
        making.make(breaks(), corpus.tokenizer(), 24, tmp_path / "set", overwrite=True)
    assert os.listdir(tmp_path) == ["set"]
    assert len(datasets.load_from_disk(str(tmp_path / "set"))[0]["input_ids"]) == 48
    making.make(corpus.TEXTS, corpus.tokenizer(), 24, tmp_path / "set", overwrite=True)
    assert len(datasets.load_from_disk(str(tmp_path / "set"))[0]["input_ids"]) == 24


KILLED = """
import os, signal, sys
from nxd_jax.training.data import making
def texts():
    for k in range(5000):
        yield "text " * 20
    os.kill(os.getpid(), signal.SIGKILL)
class Tokenizer:
    def __call__(self, texts, **_):
        return {"input_ids": [list(t.encode()) for t in texts]}
making.make(texts(), Tokenizer(), 64, sys.argv[1])
"""


def test_a_killed_run(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "set")], check=False)
    left = os.listdir(tmp_path)
    assert len(left) == 1 and left[0].startswith(".set.partial-")
    making.make(corpus.TEXTS, corpus.tokenizer(), 48, tmp_path / "set")
    assert os.listdir(tmp_path) == ["set"]


def test_text_that_is_too_short(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the text has 2 tokens in 1 document\(s\), fewer than one row of 48"):
        making.make(["zz"], corpus.tokenizer(), 48, tmp_path / "set")
    with pytest.raises(ValueError, match="the length of rows must be positive, not 0"):
        making.make(["ab"], corpus.tokenizer(), 0, tmp_path / "set")
    assert os.listdir(tmp_path) == []


# -- tokenizers --------------------------------------------------------------------------------------


def test_a_tokenizer_gives_text_back(tmp_path: Path) -> None:
    made = tokenizing.train_tokenizer(corpus.TEXTS, 256, tmp_path / "tokenizer")
    loaded = tokenizing.load_tokenizer(tmp_path / "tokenizer")
    only_json = tokenizing.load_tokenizer(tmp_path / "tokenizer" / "tokenizer.json")
    assert len(made) == len(loaded) == loaded.vocab_size == 256
    assert (loaded.bos_token, loaded.eos_token, loaded.bos_token_id, loaded.eos_token_id) == ("<s>", "</s>", 0, 1)
    text = "".join(map(chr, [*range(0x20, 0x300), 0x4E2D, 0x1F600, 0x10FFFF]))
    for one in (made, loaded, only_json):
        assert one.decode(one(text)["input_ids"]) == text
        assert one(text)["input_ids"] == made(text)["input_ids"]
    ids = tokenizing.encode(corpus.tokenizer(add_bos=True), ["a", "b"])
    assert [row[0] for row in ids] == [0, 0] and np.shape(ids) == (2, 2)
    assert tokenizing.identity(made) == tokenizing.identity(loaded) != tokenizing.identity(corpus.tokenizer(add_bos=True))


def test_a_folder_with_tokenizer_json_only(tmp_path: Path) -> None:
    corpus.tokenizer().save_pretrained(str(tmp_path))
    for file in tmp_path.iterdir():
        if file.name != "tokenizer.json":
            file.unlink()
    assert len(tokenizing.load_tokenizer(tmp_path)) == 256


def test_tokenizers_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a vocabulary of 244 is too small: 245 are needed"):
        tokenizing.train_tokenizer(["a"], 244, tmp_path / "x")
    with pytest.raises(ValueError, match="there is no text to train a tokenizer on"):
        tokenizing.train_tokenizer([], 256, tmp_path / "x")
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="there is there already"):
        tokenizing.train_tokenizer(["a"], 256, tmp_path / "there")
    with pytest.raises(
        FileNotFoundError, match="data.tokenizer: there is no .*nothing. It names a folder with tokenizer.json; `nxdt-data tokenizer"
    ):
        tokenizing.load_tokenizer(tmp_path / "nothing", "data.tokenizer")
    with pytest.raises(ValueError, match="data.tokenizer: .*there is no tokenizer that transformers can load"):
        tokenizing.load_tokenizer(tmp_path / "there", "data.tokenizer")
