"""Text to Megatron sets, as `preprocess_data_for_megatron.py` makes them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nxd_jax.training.data.blocks import TEXTS
from nxd_jax.training.data.megatron.writing import IndexedWriter, smallest_dtype


@dataclass(frozen=True)
class Made:
    """What was made. prefix: without .bin and .idx. left_out: texts without a token."""

    prefix: str
    documents: int
    tokens: int
    left_out: int
    dtype: str


def make(texts: Iterable[str], tokenizer: Any, prefix: str | os.PathLike[str], append_eod: bool = False, overwrite: bool = False) -> Made:
    """Tokenise texts and write `PREFIX.bin` and `PREFIX.idx`, one document for each text.

    tokenizer: one of `tokenizers.load`. append_eod: end each document with its end of text. Ids are uint16 for vocabularies below 65500, else int32.

    Raises FileExistsError for a set that is there, ValueError for no text, and for append_eod with a tokenizer that has no end of text.
    """
    if append_eod and tokenizer.eos_id is None:
        raise ValueError(f"--append-eod needs a tokenizer with an end of text, and {tokenizer.name} has none")
    end = [tokenizer.eos_id] if append_eod else []
    left_out = 0
    waiting = iter(texts)
    with IndexedWriter(prefix, smallest_dtype(tokenizer.vocab_size), overwrite) as writer:
        while batch := list(itertools.islice(waiting, TEXTS)):
            for ids in tokenizer.encode(batch):
                if ids:
                    writer.add([*ids, *end])
                    writer.end_document()
                else:
                    left_out += 1
        if not writer.documents:
            raise ValueError("there is no text to make a set of")
    return Made(writer.prefix, writer.documents, writer.tokens, left_out, writer.dtype.name)
