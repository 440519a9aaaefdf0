"""Sets as data.train_dir names them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from nxd_jax.training.data import sets
from tests.nxd_jax.training.data import corpus


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `datasets` keeps files."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder))
    return folder


def wanted(value: Any, use: str = "train", **options: Any) -> sets.Wanted:
    return sets.Wanted(f"data.{use}_dir", value if isinstance(value, list) else str(value), use, **options)


def ids(found: Any) -> list[list[int]]:
    """Of a set, or of what is read from front to back."""
    if callable(found):
        return [row for table in found() for row in table.column("input_ids").to_pylist()]
    return found.with_format(None)["input_ids"][:]


def write(folder: Path, rows: Any) -> dict[str, Path]:
    """A set in every kind of file."""
    (folder / "some").mkdir()
    lines = [json.dumps({"input_ids": row, "labels": row}) + "\n" for row in rows]
    (folder / "a.jsonl").write_text("".join(lines))
    (folder / "some" / "1.jsonl").write_text("".join(lines[:2]))
    (folder / "some" / "2.jsonl").write_text("".join(lines[2:]))
    (folder / "c.json").write_text(json.dumps([{"input_ids": row} for row in rows]))
    pa.parquet.write_table(pa.table({"input_ids": rows}), folder / "d.parquet")
    corpus.save(corpus.numbers(len(rows)), folder / "e")
    corpus.save(datasets.DatasetDict({"train": corpus.numbers(len(rows)), "test": corpus.numbers(2)}), folder / "f")
    return {name: folder / name for name in ("a.jsonl", "some", "c.json", "d.parquet", "e", "f")}


def test_every_kind(tmp_path: Path) -> None:
    rows = corpus.numbers(7)["input_ids"][:]
    for name, path in write(tmp_path, rows).items():
        assert ids(sets.open_set(wanted(path))) == rows, name
        assert ids(sets.open_stream(wanted(path))) == rows, name
    two = wanted([str(tmp_path / "e"), str(tmp_path / "d.parquet"), str(tmp_path / "some")])
    assert ids(sets.open_set(two)) == ids(sets.open_stream(two)) == rows * 3


def test_splits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    both = datasets.DatasetDict({"train": corpus.numbers(3), "validation": corpus.numbers(2)})
    path = corpus.save(both, tmp_path / "both")
    with caplog.at_level(logging.INFO, "nxd_jax"):
        assert [len(sets.open_set(wanted(path, use))) for use in ("train", "val")] == [3, 2]
    assert "both holds the splits train, validation: validation is taken" in caplog.text
    assert len(ids(sets.open_stream(wanted(path, "val")))) == 2
    words = "data.test_dir=.*both holds the splits train, validation, and none is named test: name the folder of one of them, such as .*both/train"
    for open_it in (sets.open_set, sets.open_stream):
        with pytest.raises(ValueError, match=words):
            open_it(wanted(path, "test"))
    assert len(sets.open_set(wanted(corpus.save(datasets.DatasetDict({"mine": corpus.numbers(4)}), tmp_path / "one"), "val"))) == 4


def test_text(tmp_path: Path, cache: Path) -> None:
    """Tokenised once; a text that changes is tokenised again."""
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"content": t}) + "\n" for t in corpus.TEXTS))
    options = {"tokenizer": corpus.tokenizer(), "length": 32, "column": "content"}
    rows = corpus.reference(corpus.TEXTS, 32)
    for _ in range(2):
        assert ids(sets.open_set(wanted(file, **options))) == rows
    assert len([p for p in (cache / "nxdt").iterdir() if p.is_dir()]) == 1
    assert ids(sets.open_stream(wanted(file, **options))) == rows
    file.write_text(json.dumps({"content": corpus.TEXTS[0] * 4}))
    assert ids(sets.open_set(wanted(file, **options))) == corpus.reference([corpus.TEXTS[0] * 4], 32)
    saved = corpus.save(datasets.Dataset.from_dict({"content": corpus.TEXTS}), tmp_path / "saved")
    assert ids(sets.open_set(wanted(saved, **options))) == ids(sets.open_stream(wanted(saved, **options))) == rows
    (tmp_path / "b.txt").write_text(corpus.TEXTS[1] * 4)
    assert ids(sets.open_set(wanted(tmp_path / "b.txt", **options))) == corpus.reference([corpus.TEXTS[1] * 4], 32)


def test_what_is_no_set(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "x"}\n')
    (tmp_path / "t.txt").write_text("x")
    (tmp_path / "bad.jsonl").write_text('{"input_ids": [1]}\n{"input_ids": \n')
    (tmp_path / "empty").mkdir()
    corpus.save(datasets.Dataset.from_dict({"input_ids": ["a"]}), tmp_path / "strings")
    corpus.save(datasets.Dataset.from_dict({"words": ["a"]}), tmp_path / "words")
    (tmp_path / "floats.jsonl").write_text('{"input_ids": [1.5]}\n')
    cases = {
        "nothing": "data.train_dir=.*nothing: there is no .*nothing. It names a folder that datasets' save_to_disk wrote.*`nxdt-data make --text",
        "a.jsonl": r"a.jsonl has the columns content, and must have input_ids \(lists of token ids\), or the text column 'text' \(data.text_column names",
        "t.txt": "t.txt holds text, and data.tokenizer is not set: name a tokenizer's folder, or make a set before",
        "empty": "data.train_dir=.*empty: there is nothing to read",
        "bad.jsonl": "bad.jsonl.* (cannot be read|is no JSON)",
        "words": r"words has the columns words, and must have input_ids \(lists of token ids\), or the text column 'text'",
        "floats.jsonl": "column input_ids holds .*float64.*, and must hold lists of whole numbers",
        "strings": r"column input_ids holds Value\('string'\), and must hold lists of whole numbers",
    }
    for name, words in cases.items():
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            sets.open_set(wanted(tmp_path / name))
    with pytest.raises(ValueError, match=r"data.train_dir=.*t.txt: the text has 1 tokens in 1 document"):
        sets.open_set(wanted(tmp_path / "t.txt", tokenizer=corpus.tokenizer(), length=8))
    assert ids(sets.open_set(wanted(f"file://{corpus.save(corpus.numbers(3), tmp_path / 'e')}"))) == corpus.numbers(3)["input_ids"][:]
    with pytest.raises(ValueError, match=r"words has the columns words, and must have input_ids \(lists of token ids\). `nxdt-data make"):
        sets.open_set(wanted(f"file://{tmp_path}/words"))
    with pytest.raises(ValueError, match="data.streaming reads files and folders of this machine; set data.streaming=false"):
        sets.open_stream(wanted("s3://bucket/set"))


def test_the_vocabulary_of_a_model(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    (tmp_path / "bad.json").write_text("{")
    found = {
        name: sets.vocab_size_of(OmegaConf.create({"model": {"model_config": name}}))
        for name in map(str, (tmp_path, tmp_path / "config.json"))
    }
    assert set(found.values()) == {300}
    for name in (str(tmp_path / "bad.json"), "/nothing", None):
        assert sets.vocab_size_of(OmegaConf.create({"model": {"model_config": name}})) is None
