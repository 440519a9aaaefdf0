"""Small Megatron sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nxd_jax.training.data.megatron.index_maps import Wanted, build
from nxd_jax.training.data.megatron.indexed import IndexedSet
from nxd_jax.training.data.megatron.samples import GPTSamples, Rules
from nxd_jax.training.data.megatron.writing import IndexedWriter

EOD = 1


def rows(count: int, seed: int = 3, longest: int = 12, vocab: int = 50, empty: bool = True) -> list[list[int]]:
    """Documents that end with EOD; no number of them is in two documents at the same place by a rule."""
    source = np.random.default_rng(seed)
    lengths = source.integers(0 if empty else 1, longest, count)
    return [[*source.integers(2, vocab, n).tolist(), EOD] if n else ([] if empty else [EOD]) for n in lengths]


def write(prefix: Path, documents: list[list[int]], dtype: Any = np.uint16) -> Path:
    with IndexedWriter(prefix, dtype) as writer:
        for ids in documents:
            writer.add(ids)
            writer.end_document()
    return prefix


def samples(prefix: Path, count: int, seq_length: int = 8, seed: int = 7, drop_last: bool = True, **rules: Any) -> GPTSamples:
    indexed = IndexedSet(prefix)
    made = Rules(seq_length, **rules)
    return GPTSamples(indexed, build(Wanted(indexed.sizes, 0, len(indexed), count, seq_length, seed, made.extra, drop_last)), made)
