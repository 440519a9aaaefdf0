"""Rows and texts of files of every kind."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from nxd_jax.training.data import records
from tests.nxd_jax.training.data import corpus

TEXTS = ["one\n\ntwo", "three", "four\nfive"]


def write(folder: Path) -> dict[str, Path]:
    """The texts in every kind of file."""
    lines = "".join(json.dumps({"text": t, "n": k}) + "\n" for k, t in enumerate(TEXTS))
    (folder / "a.jsonl").write_text(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "c.json").write_text(json.dumps([{"text": t} for t in TEXTS]))
    pa.parquet.write_table(pa.table({"text": TEXTS, "n": [1, 2, 3]}), folder / "d.parquet")
    corpus.save(datasets.Dataset.from_dict({"text": TEXTS}), folder / "e")
    corpus.save(datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})}), folder / "f")
    (folder / "g").mkdir()
    for k, text in enumerate(TEXTS):
        (folder / "g" / f"{k}.txt").write_text(text)
    return {p.name: p for p in folder.iterdir()}


def test_every_kind_has_the_same_texts(tmp_path: Path) -> None:
    found = write(tmp_path)
    assert {name: list(records.documents([p])) for name, p in found.items()} == dict.fromkeys(found, TEXTS)
    assert list(records.documents([found["a.jsonl"], found["g"]])) == TEXTS * 2
    assert list(records.documents([next((tmp_path / "e").glob("*.arrow"))])) == TEXTS
    assert records.columns_of(found["d.parquet"]) == ["text", "n"]
    assert [t.num_rows for t in records.tables(found["a.jsonl"], rows=2)] == [2, 1]


def test_what_of_a_text_file_is_a_text(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\ntwo\r\n\r\nthree\n\n\n")
    assert list(records.documents([file])) == ["one\ntwo\n\nthree\n\n\n"]
    assert list(records.documents([file], sample_by="paragraph")) == ["one\ntwo", "three"]
    assert list(records.documents([file], sample_by="line")) == ["one", "two", "three"]


def test_what_cannot_be_read(tmp_path: Path) -> None:
    files = write(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.csv").write_text("a,b")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "list.jsonl").write_text("3\n")
    (tmp_path / "indented.json").write_text('{\n "text": "a"\n}')
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xfd")
    (tmp_path / "bad.parquet").write_text("no")
    (tmp_path / "null.jsonl").write_text('{"text": 3}\n')
    for name, words in {
        "nothing": "there is no file or folder",
        "empty": "there is nothing to read in .*empty: it has no files named .jsonl, .json, .parquet, .arrow, .txt",
        "x.csv": "x.csv cannot be read by its name, which must end in",
        "bad.jsonl": "bad.jsonl:2 is no JSON",
        "list.jsonl": "list.jsonl:1 must be an object",
        "indented.json": "must have an object in each line",
        "latin.txt": "cannot be read as .txt",
        "bad.parquet": "cannot be read as .parquet",
        "null.jsonl": "column 'text' holds '3', which is no text",
    }.items():
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            list(records.documents([tmp_path / name]))
    with pytest.raises(ValueError, match="a.jsonl has no column 'content'; it has text, n"):
        list(records.documents([files["a.jsonl"]], "content"))
    splits = datasets.DatasetDict({"a": datasets.Dataset.from_dict({"text": TEXTS}), "b": datasets.Dataset.from_dict({"text": TEXTS})})
    with pytest.raises(ValueError, match="holds the splits a, b: name one of their folders"):
        list(records.documents([corpus.save(splits, tmp_path / "two")]))
