"""Folders of rows of one length, as the original's get_dataset.py made them (`Dataset.save_to_disk`). What a killed run leaves is never taken for a set."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from nxd_jax.training.data import partials
from nxd_jax.training.data.blocks import Blocks

COLUMNS = ("input_ids", "attention_mask", "labels")


@dataclass(frozen=True)
class Made:
    """What was made. left_over: tokens at the end of the text that fill no row."""

    folder: Path
    rows: int
    length: int
    documents: int
    tokens: int
    left_over: int


def make(documents: Iterable[str], tokenizer: Any, length: int, out: str | os.PathLike[str], overwrite: bool = False) -> Made:
    """Tokenise texts, cut them into rows of `length` ids and write them to a folder with the columns input_ids, attention_mask (ones), labels (the same ids).

    Raises FileExistsError for a folder that is there, ValueError for a text that fills no row.
    """
    folder = Path(out)
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{folder} is there already; choose another folder, or pass --overwrite")
    partial = partials.partial(folder)
    partials.remove_old(folder)
    partial.mkdir(parents=True)
    try:
        blocks = Blocks(documents, tokenizer, length)
        _write(blocks, partial / "rows.arrow")
        if not blocks.rows:
            raise ValueError(
                f"the text has {blocks.tokens} tokens in {blocks.documents} document(s), fewer than one row of {length}: give more text, or a smaller length"
            )
        data = datasets.Dataset.from_file(str(partial / "rows.arrow"))
        data.save_to_disk(str(partial / "set"))
        del data
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial / "set", folder)
    finally:
        partials.remove(partial)
    return Made(folder, blocks.rows, length, blocks.documents, blocks.tokens, blocks.left_over)


def features() -> datasets.Features:
    """The columns, with the types that transformers' tokenizers give them."""
    kinds = {"input_ids": "int32", "attention_mask": "int8", "labels": "int32"}
    return datasets.Features({name: datasets.Sequence(datasets.Value(kind)) for name, kind in kinds.items()})


def table(ids: np.ndarray) -> pa.Table:
    """Rows of ids [rows, length] as a table with all columns."""
    count, length = ids.shape
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * length)
    columns = {"input_ids": ids, "attention_mask": np.ones_like(ids, np.int8), "labels": ids}
    return pa.table({name: pa.ListArray.from_arrays(offsets, pa.array(values.reshape(-1))) for name, values in columns.items()})


def _write(blocks: Blocks, file: Path) -> None:
    schema = features().arrow_schema
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for ids in blocks:
            writer.write_table(table(ids).cast(schema))
