"""nxdt-data: what it makes and what it says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import datasets
import pytest

from nxd_jax.training.data import command
from tests.nxd_jax.training.data import corpus


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        command.main([str(word) for word in words])
    if isinstance(ended.value.code, str):
        raise ended.value
    return int(ended.value.code or 0)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"body": t}) + "\n" for t in corpus.TEXTS))
    return file


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    corpus.tokenizer().save_pretrained(str(tmp_path / "tokenizer"))
    return tmp_path / "tokenizer"


YAML = """
trainer: {devices: 4, num_nodes: 2, max_steps: 30}
data: {micro_batch_size: 1, global_batch_size: 8}
distributed_strategy: {tensor_model_parallel_size: 2}
model: {encoder_seq_length: 32, model_config: CONFIG}
"""


def configuration(folder: Path, vocab_size: int = 256) -> Path:
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    (folder / "conf.yaml").write_text(YAML.replace("CONFIG", str(folder / "config.json")))
    return folder / "conf.yaml"


def test_from_text_to_a_set(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = tmp_path / "new"
    assert run("tokenizer", "--text", text, "--column", "body", "--vocab-size", 256, "--out", new) == 0
    assert run("make", "--text", text, "--column", "body", "--tokenizer", new, "--length", 32, "--out", tmp_path / "set") == 0
    rows = corpus.reference(corpus.TEXTS, 32)
    assert datasets.load_from_disk(str(tmp_path / "set"))["input_ids"][:] == rows
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{new}: a tokenizer with 256 tokens"
    assert said[1].startswith(f"{tmp_path}/set: {len(rows)} rows of 32 ids from 40 texts with ") and said[1].endswith(" fill no row")
    assert len(said) == 2
    assert run("check", tmp_path / "set", "--config", configuration(tmp_path)) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/set: {len(rows)} rows of 32 ids, {len(rows) * 32:,} tokens",
        "  columns         input_ids (list<item: int32>), attention_mask (list<item: int8>), labels (list<item: int32>)",
        f"  ids             {min(map(min, rows))} to {max(map(max, rows))}, {len(set().union(*rows))} different ones",
        "  labels          as input_ids; 0 are -100 (no loss)",
        "  attention_mask  ones",
        "  vocabulary      the model's vocab_size is 256",
        f"with {tmp_path}/conf.yaml",
        "  a step          8 rows, 256 tokens: 4 data-parallel ranks x 2 micro-batches of 1",
        f"  an epoch        {len(rows) // 8} steps, {len(rows) % 8} rows left out",
        f"  the training    trainer.max_steps=30: {30 / (len(rows) // 8):.3g} epochs, {30 * 256:,} tokens",
        "no problems",
    ]


def test_a_small_text_has_fewer_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("abab")
    assert run("tokenizer", "--text", tmp_path / "a.txt", "--vocab-size", 300, "--out", tmp_path / "t", "--add-bos") == 0
    assert "a tokenizer with 247 tokens (the text has no more pairs" in capsys.readouterr().out


def test_show(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = corpus.tokenizer()("Its number")["input_ids"]
    labels = [-100, *ids[1:]]
    data = {"input_ids": [ids, ids], "labels": [ids, labels], "attention_mask": [[1] * len(ids)] * 2, "title": ["a", "b"]}
    corpus.save(datasets.Dataset.from_dict(data), tmp_path / "set")
    assert run("show", tmp_path / "set", "--tokenizer", tokenizer, "--row", 0, "--count", 5) == 0
    words = " ".join(map(str, ids))
    mask = f"attention_mask: {len(ids)} of {len(ids)} are 1"
    assert capsys.readouterr().out.split("\n") == [
        *(f"row 0: {len(ids)} ids", f"  {words}", "text", "  Its number", "labels: as input_ids", mask, "  title: a", ""),
        *(f"row 1: {len(ids)} ids", f"  {words}", "text", "  Its number"),
        *(f"labels: 1 of {len(ids)} are -100", f"  {' '.join(map(str, labels))}", mask, "  title: b", ""),
    ]
    assert run("show", tmp_path / "set", "--row", 1) == 0
    assert capsys.readouterr().out.startswith("row 1")
    corpus.save(datasets.Dataset.from_dict({"text": ["words"]}), tmp_path / "text")
    assert run("show", tmp_path / "text") == 0
    assert capsys.readouterr().out == "row 0\n  text: words\n"
    with pytest.raises(SystemExit, match="nxdt-data: there is no row 7: there are 2 rows, from 0 on"):
        run("show", tmp_path / "set", "--row", 7)


def columns(**changed: Any) -> dict[str, Any]:
    ids = [[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4]]
    return {"input_ids": ids, "attention_mask": [[1] * 4] * 3, "labels": ids, **changed}


SETS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "widths": (columns(input_ids=[[1, 2], [1] * 4, [1] * 4], labels=[[1, 2], [1] * 4, [1] * 4], attention_mask=[[1] * 2, [1] * 4, [1] * 4]), (
        "problem: 1 row(s) have 2 ids where most have 4, row 0 first: all must be as wide",
    )),
    "columns of other lengths": (columns(labels=[[1], [5, 6, 7, 8], [1]]), (
        "problem: row 0 has 4 input_ids and 1 numbers in labels (and 1 more rows): the columns of a row must be as long",
    )),
    "negative": (columns(input_ids=[[1, 2, 3, -7], [5, 6, 7, 8], [1, 2, 3, 4]]), ("problem: row 0 has the id -7: ids are 0 or more",)),
    "labels": (columns(labels=[[1, 2, 3, 4], [-100, 6, 7, 8], [1, -1, 3, 4]]), (
        "  labels          as input_ids in 2 of 3 rows; 1 are -100 (no loss)",
        "problem: row 2 has the label -1: labels are ids, or -100 for no loss",
    )),
    "labels of the next place": (columns(labels=[[2, 3, 4, -100], [6, 7, 8, -100], [2, 3, 4, 9]]), (
        "problem: labels are the ids of the next place: the model shifts them itself, so they must equal input_ids",
    )),
    "mask": (columns(attention_mask=[[1] * 4, [1, 1, 1, 2], [0, 1, 1, 1]]), (
        "  attention_mask  1 zeros",
        "  note            attention is causal whatever attention_mask says; give padding the label -100",
        "problem: row 1 has 2 in attention_mask: it holds 0 and 1",
    )),
    "others": (columns(title=["a", "b", "c"]), ("  note            a training leaves out title", "no problems")),
    "none": ({"input_ids": []}, ("problem: there are no rows",)),
}  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_check_says_what_does_not_fit(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, lines = SETS[name]
    if data["input_ids"]:
        corpus.save(datasets.Dataset.from_dict(data), tmp_path / "set")
    else:
        corpus.save(corpus.numbers(0), tmp_path / "set")
    wrong = any(line.startswith("problem") for line in lines)
    assert run("check", tmp_path / "set") == int(wrong)
    said = capsys.readouterr().out.splitlines()
    assert set(lines) <= set(said), said
    assert sum(line.startswith("problem") for line in said) == int(wrong)


def test_check_against_a_configuration(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus.save(corpus.numbers(7), tmp_path / "set")
    conf = configuration(tmp_path, 5)

    def said(*words: object) -> str:
        run("check", tmp_path / "set", "--config", conf, *words)
        return capsys.readouterr().out

    found = said()
    assert "problem: rows have 4 ids, and model.encoder_seq_length is 32: set it to 4, or make rows of 32" in found
    assert "problem: there are 7 rows, and a step needs data.global_batch_size=8" in found
    assert (
        "problem: row 6 has the id 6, and the model's vocab_size is 5: ids must be below it. Tokenise with the model's own tokenizer"
        in found
    )
    assert "problem: data.global_batch_size=6 must be a multiple of" in said("--override", "data.global_batch_size=6")
    assert "trainer.devices=auto: how many steps there are depends on the machine" in said("--override", "trainer.devices=auto")
    assert run("check", tmp_path / "set", "--tokenizer", tokenizer) == 0
    assert "the tokenizer's size is 256" in capsys.readouterr().out


def test_mistakes(text: Path, tokenizer: Path, tmp_path: Path) -> None:
    make = ("make", "--text", text, "--tokenizer", tokenizer, "--length", 8)
    corpus.save(datasets.Dataset.from_dict({"text": ["a"]}), tmp_path / "there")
    corpus.save(datasets.Dataset.from_dict({"input_ids": [1]}), tmp_path / "numbers")
    cases: dict[str, tuple[object, ...]] = {
        "has no column 'text'; it has body: say which holds the text": (*make, "--out", tmp_path / "x"),
        "there is there already; choose another folder, or pass --overwrite": (*make, "--out", tmp_path / "there"),
        "--tokenizer: there is no /nothing": ("make", "--text", text, "--tokenizer", "/nothing", "--out", "x"),
        "there is no file or folder /nothing": ("check", "/nothing"),
        "has the columns text, and no input_ids": ("check", tmp_path / "there"),
        "column input_ids holds int(32|64), and must hold lists of whole numbers": ("check", tmp_path / "numbers"),
        "there is no configuration file .*nothing.yaml": ("check", tmp_path / "there", "--config", tmp_path / "nothing.yaml"),
    }
    for words, arguments in cases.items():
        with pytest.raises(SystemExit, match=f"nxdt-data: .*{words}"):
            run(*arguments)
    assert not os.path.exists("x")
