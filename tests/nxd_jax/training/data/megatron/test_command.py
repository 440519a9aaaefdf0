"""nxdt-data for Megatron sets: what it makes and what it says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from nxd_jax.training.data.megatron import making, tokenizers
from nxd_jax.training.data.megatron.indexed import IndexedSet
from nxd_jax.training.data.megatron.writing import IndexedWriter
from tests.nxd_jax.training.data import corpus
from tests.nxd_jax.training.data.megatron import corpora
from tests.nxd_jax.training.data.megatron.test_tokenizers import gpt2_files
from tests.nxd_jax.training.data.test_command import run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": t, "title": f"Title {k}"}) + "\n" for k, t in enumerate(corpus.TEXTS)))
    return file


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    corpus.tokenizer(add_bos=True).save_pretrained(str(tmp_path / "tokenizer"))
    return tmp_path / "tokenizer"


def documents(prefix: Path) -> list[list[int]]:
    found = IndexedSet(prefix)
    assert found.documents.tolist() == list(range(len(found) + 1))
    return [found[k].tolist() for k in range(len(found))]


def test_from_text_to_a_set(text: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = [corpus.tokenizer()(t)["input_ids"] for t in corpus.TEXTS]
    make = ("megatron", "--input", text, "--tokenizer", tokenizer, "--output-prefix")
    assert run(*make, tmp_path / "a") == 0 and documents(tmp_path / "a_text_document") == plain
    assert run(*make, tmp_path / "b", "--append-eod", "--json-keys", "text", "title") == 0
    assert documents(tmp_path / "b_text_document") == [[*ids, 1] for ids in plain]
    assert [ids[-1] for ids in documents(tmp_path / "b_title_document")] == [1] * 40
    total = sum(map(len, plain))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{tmp_path}/a_text_document: 40 documents with {total:,} tokens (uint16)"
    assert said[1] == f"{tmp_path}/b_text_document: 40 documents with {total + 40:,} tokens (uint16)" and len(said) == 3


def test_gpt2(text: Path, tmp_path: Path) -> None:
    files = gpt2_files(tmp_path)
    words = ("--tokenizer-library", "megatron", "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", files["vocab_file"])
    assert (
        run("megatron", "--text", text, *words, "--merge-file", files["merge_file"], "--append-eod", "--output-prefix", tmp_path / "a") == 0
    )
    made = tokenizers.load({"library": "megatron", "type": "GPT2BPETokenizer", **files})
    assert documents(tmp_path / "a_text_document") == [[*made.text_to_ids(t), 0] for t in corpus.TEXTS]


def test_texts_without_tokens_and_large_vocabularies(tmp_path: Path) -> None:
    class Letters(tokenizers.TextTokenizer):
        vocab_size, eos_id, name = 70000, 69999, "letters"

        def encode(self, texts: list[str]) -> list[list[int]]:
            return [[ord(letter) for letter in t if letter != "x"] for t in texts]

    made = making.make(["ab", "xx", "c"], Letters(), tmp_path / "a", append_eod=True)
    assert (made.documents, made.tokens, made.left_out, made.dtype) == (2, 5, 1, "int32")
    assert documents(tmp_path / "a") == [[97, 98, 69999], [99, 69999]]
    with pytest.raises(ValueError, match="there is no text to make a set of"):
        making.make(["x"], Letters(), tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


YAML = """
seed: 3
trainer: {devices: 4, num_nodes: 1, max_steps: 30}
data: {micro_batch_size: 1, global_batch_size: 8, seq_length: 16, splits_string: "80,10,10", tokenizer: {library: huggingface, type: TOKENIZER}}
distributed_strategy: {tensor_model_parallel_size: 2}
model: {encoder_seq_length: 16}
"""


def test_check(text: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("megatron", "--text", text, "--tokenizer", tokenizer, "--append-eod", "--output-prefix", tmp_path / "a")
    (tmp_path / "conf.yaml").write_text(YAML.replace("TOKENIZER", str(tokenizer)))
    capsys.readouterr()
    rows = [[*corpus.tokenizer()(t)["input_ids"], 1] for t in corpus.TEXTS]
    flat = [i for ids in rows for i in ids]
    training = sum(map(len, rows[:32]))
    for name in ("a_text_document", "a_text_document.bin", "a_text_document.idx"):
        assert run("check", tmp_path / name, "--config", tmp_path / "conf.yaml") == 0
        assert capsys.readouterr().out.splitlines() == [
            f"{tmp_path}/a_text_document: 40 documents, {len(flat):,} tokens (uint16)",
            f"  lengths         {min(map(len, rows))} to {max(map(len, rows))} tokens, {len(flat) / 40:.6g} in the mean",
            f"  ids             {min(flat)} to {max(flat)}, {len(set(flat))} different ones",
            "  ends            40 of 40 documents end with the id 1",
            "  vocabulary      the tokenizer has 256 tokens",
            "  end of text     40 documents end with that of the tokenizer (1); --append-eod puts it there",
            f"with {tmp_path}/conf.yaml",
            f"  for training    documents 0 to 31: {training:,} tokens, {(training - 1) // 16} samples of 16",
            "  a step          8 samples, 128 tokens",
            f"  the training    240 samples, {240 * 16 / training:.3g} epochs of this set alone",
            "no problems",
        ]


def test_problems(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpora.write(tmp_path / "a", [[1, 2], [], [3, 300, 300]], np.int32)
    (tmp_path / "conf.yaml").write_text(YAML.replace("TOKENIZER", str(tokenizer)))
    words = ("--config", tmp_path / "conf.yaml", "--override", "data.global_batch_size=3")
    assert run("check", tmp_path / "a", *words) == 1
    said = capsys.readouterr().out
    assert "problem: document 2 has the id 300, and the tokenizer has 256 tokens: ids must be below it. It is a set of another one" in said
    assert "0 to 3 tokens, 1.66667 in the mean; 1 are empty" in said and "1 of 2 documents end with the id 2" in said
    assert "problem: data.global_batch_size=3 must be a multiple" in said
    assert run("check", tmp_path / "a", "--config", tmp_path / "conf.yaml", "--override", "trainer.devices=auto") == 1
    assert "trainer.devices=auto: how many samples there are depends on the machine" in capsys.readouterr().out
    corpora.write(tmp_path / "b", [[-5, 2]], np.int32)
    corpora.write(tmp_path / "c", [[]])
    corpora.write(tmp_path / "d", [[1]], np.float32)
    with IndexedWriter(tmp_path / "e") as writer:
        for _ in range(4):
            writer.add([5])
        writer.end_document()
    for name, line in {
        "b": "problem: there is the id -5: ids are 0 or more",
        "c": "problem: there are no tokens",
        "d": "problem: it holds float32 numbers, and token ids are whole numbers",
    }.items():
        assert run("check", tmp_path / name) == 1
        assert line in capsys.readouterr().out.splitlines()
    assert run("check", tmp_path / "e") == 0
    assert "4 sequences make 1 documents; each sequence counts as a document, as in the original" in capsys.readouterr().out
    assert run("check", tmp_path / "e", tmp_path / "c") == 1
    assert len(capsys.readouterr().out.split("\n\n")) == 2


def test_show(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = corpus.tokenizer()("Its number")["input_ids"]
    corpora.write(tmp_path / "a", [[2, 3], ids, [4]])
    assert run("show", tmp_path / "a", "--row", 1, "--count", 9, "--tokenizer", tokenizer) == 0
    assert capsys.readouterr().out.split("\n") == [
        *(f"document 1: {len(ids)} ids", f"  {' '.join(map(str, ids))}", "text", "  Its number", ""),
        *("document 2: 1 ids", "  4", "text", f"  {corpus.tokenizer().decode([4])}", ""),
    ]
    assert run("show", tmp_path / "a") == 0
    assert capsys.readouterr().out == "document 0: 2 ids\n  2 3\n"


def test_mistakes(text: Path, tokenizer: Path, tmp_path: Path) -> None:
    corpora.write(tmp_path / "a", [[1]])
    corpora.write(tmp_path / "there_text_document", [[1]])
    (tmp_path / "half.bin").touch()
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    config.pop("eos_token")
    (tmp_path / "endless").mkdir()
    (tmp_path / "endless" / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    (tmp_path / "endless" / "tokenizer_config.json").write_text(json.dumps(config))
    make = ("megatron", "--text", text, "--output-prefix")
    for said, words in {
        "there is no document 1: there are 1, from 0 on": ("show", tmp_path / "a", "--row", 1),
        "there is no .*half.idx": ("check", tmp_path / "half"),
        "there_text_document.bin is there already; choose another prefix": (*make, tmp_path / "there", "--tokenizer", tokenizer),
        "--tokenizer FOLDER must be given, or --tokenizer-library with its files": (*make, tmp_path / "x"),
        "--append-eod needs a tokenizer with an end of text": (*make, tmp_path / "x", "--tokenizer", tmp_path / "endless", "--append-eod"),
        "has no column 'body'": (*make, tmp_path / "x", "--tokenizer", tokenizer, "--json-keys", "body"),
    }.items():
        with pytest.raises(SystemExit, match=f"nxdt-data: .*{said}"):
            run(*words)
    assert not list(tmp_path.glob("x*"))
