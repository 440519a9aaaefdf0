"""A small tokenizer, texts and sets."""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path
from typing import Any

import datasets
import pytest

from nxd_jax.training.data import tokenizing

TEXTS = [f"Line {k} of a text.\nIts number is {k * k}; \u00e9\u00df\u4e2d {'ab' * (k % 7)}" for k in range(40)]

MARKS = [pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")]


@functools.cache
def tokenizer(add_bos: bool = False) -> Any:
    """256 tokens, of text like `TEXTS`."""
    with tempfile.TemporaryDirectory() as folder:
        return tokenizing.train_tokenizer(TEXTS, 256, Path(folder) / "tokenizer", add_bos)


def reference(texts: list[str], length: int, add_bos: bool = False) -> list[list[int]]:
    """The rows that the original's script would make of one batch of texts."""
    ids = list(itertools.chain(*(tokenizer(add_bos)(text)["input_ids"] for text in texts)))
    return [ids[k : k + length] for k in range(0, len(ids) // length * length, length)]


def numbers(rows: int, width: int = 4, **columns: Any) -> datasets.Dataset:
    """A set whose row k begins with k."""
    ids = [[k, *range(1, width)] for k in range(rows)]
    return datasets.Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * width] * rows, "labels": ids, **columns})


def save(data: Any, folder: Path) -> Path:
    datasets.disable_progress_bars()
    data.save_to_disk(str(folder))
    return folder
