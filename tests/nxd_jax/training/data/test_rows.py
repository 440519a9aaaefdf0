"""Rows as tensors, and what is said of those that do not fit."""

from __future__ import annotations

import logging
from typing import Any

import datasets
import pyarrow as pa
import pytest
import torch

from nxd_jax.training.data.rows import Rows, Rules
from tests.nxd_jax.training.data import corpus


def rules(**options: Any) -> Rules:
    return Rules("data.train_dir=/set", **options)


def test_columns() -> None:
    found = Rows(corpus.numbers(6, 4, other=["x"] * 6), rules(width=4, vocab_size=8)).__getitems__([5, 2])
    assert [list(row) for row in found] == [["input_ids", "attention_mask", "labels"]] * 2
    assert all(values.dtype == torch.int64 for row in found for values in row.values())
    assert [row["input_ids"].tolist() for row in found] == [[5, 1, 2, 3], [2, 1, 2, 3]]


def test_columns_that_are_missing() -> None:
    data = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3, 4]]})
    row = Rows(data, rules())[1]
    assert {name: values.tolist() for name, values in row.items()} == {"input_ids": [3, 4], "attention_mask": [1, 1], "labels": [3, 4]}
    row["labels"][0] = -100
    assert row["input_ids"].tolist() == [3, 4]


def test_columns_that_only_some_rows_have() -> None:
    """As where files with and without them are read together."""
    table = pa.table({"input_ids": [[1, 2], [3, 4]], "labels": [None, [5, 6]], "attention_mask": [[0, 1], None]})
    found = rules(width=2).tensors(table, [0, 1])
    assert {name: values.tolist() for name, values in found.items()} == {
        "input_ids": [[1, 2], [3, 4]],
        "attention_mask": [[0, 1], [1, 1]],
        "labels": [[1, 2], [5, 6]],
    }


KINDS = (pa.list_(pa.int16()), pa.large_list(pa.int64()), pa.list_(pa.uint8(), 2))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_types_of_columns(kind: Any) -> None:
    table = pa.table({"input_ids": pa.array([[1, 2], [3, 4], [5, 6]], kind)})
    assert rules(width=2).tensors(table.slice(1), [1, 2])["input_ids"].tolist() == [[3, 4], [5, 6]]
    joined = pa.concat_tables([table, table.slice(2)])
    assert rules(width=2).tensors(joined, range(4))["labels"].tolist() == [[1, 2], [3, 4], [5, 6], [5, 6]]


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "width": (
        {"input_ids": [[1, 2], [3]]},
        {"width": 2},
        r"row 11 of data.train_dir=/set has 1 numbers in input_ids, and model.encoder_seq_length=2: all rows must be as wide. `nxdt-data make --length 2` cuts "
        "text into such rows; or set model.encoder_seq_length=1",
    ),
    "width of others": ({"input_ids": [[1, 2]], "labels": [[1]]}, {"width": 2}, "row 10 .* has 1 numbers in labels"),
    "width without a rule": ({"input_ids": [[1, 2], [3]]}, {}, "row 11 .* has 1 numbers in input_ids, and the rows before it have 2"),
    "none": ({"input_ids": [[1, 2], None]}, {"width": 2}, "row 11 .* has 0 numbers in input_ids"),
    "null": ({"input_ids": [[1, 2], [1, None]]}, {"width": 2}, "input_ids of row 11 holds null in place of a number"),
    "id": (
        {"input_ids": [[1, 2], [3, 8]]},
        {"vocab_size": 8, "vocabulary": "vocab_size in c.json"},
        r"row 11 of data.train_dir=/set has 8 in input_ids \(place 1\), and vocab_size in c.json is 8: ids are 0 to 7. Tokenise with the model's own "
        "tokenizer, or give the model a vocabulary of at least 9",
    ),
    "negative id": ({"input_ids": [[-100, 2]]}, {"vocab_size": 8}, r"row 10 .* has -100 in input_ids \(place 0\)"),
    "label": (
        {"input_ids": [[1, 2]], "labels": [[-100, 9]]},
        {"vocab_size": 8},
        r"has 9 in labels \(place 1\).*ids are 0 to 7, labels also -100",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_rows_that_do_not_fit(name: str) -> None:
    columns, options, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        rules(**options).tensors(pa.table(columns), [10, 11])


def test_labels_that_no_loss_is_taken_of() -> None:
    table = pa.table({"input_ids": [[1, 2]], "labels": [[-100, 2]]})
    assert rules(vocab_size=3).tensors(table, [0])["labels"].tolist() == [[-100, 2]]


def test_masks_that_have_no_effect_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """(q) In the original they have none either, and nothing says so."""
    given = rules(width=3)
    ids, filled = [[1, 2, 3]] * 3, [[1, 1, 1], [0, 1, 1], [1, 1, 0]]

    def said(mask: list[list[int]], labels: list[list[int]]) -> str:
        caplog.clear()
        given.tensors(pa.table({"input_ids": ids, "attention_mask": mask, "labels": labels}), [4, 5, 6])
        return caplog.text

    with caplog.at_level(logging.WARNING, "nxd_jax"):
        assert said([[1] * 3] * 3, ids) == "" == said([[1, 1, 0]] * 3, [[1, 2, -100]] * 3)
        text = said(filled, [[1, 2, 3], [-100, 2, 3], [1, 2, 3]])
        assert "row 5 of data.train_dir=/set has attention_mask 0 before a 1: masks have no effect" in text
        assert "row 6 of data.train_dir=/set has labels where attention_mask is 0, and they count" in text
        assert said(filled, ids) == ""  # said once
