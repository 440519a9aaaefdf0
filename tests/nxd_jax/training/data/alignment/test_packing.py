"""Examples in rows of one length."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from nxd_jax.training.data.alignment import packing
from nxd_jax.training.data.alignment.examples import Examples

END = 2


def examples(lengths: list[int], seed: int = 0) -> Examples:
    source = np.random.default_rng(seed)
    total = sum(lengths)
    return Examples(source.integers(3, 99, total, np.int32), source.random(total) < 0.5, np.cumsum(lengths), "rows")


def packed_by_hand(made: Examples, length: int) -> list[dict[str, list[int]]]:
    """The original's rule with its labels mended, one id after the other."""
    rows: list[dict[str, list[int]]] = []
    now: dict[str, list[int]] = {"input_ids": [], "attention_mask": [], "labels": [], "position_ids": []}

    def close() -> None:
        if now["input_ids"]:
            fill = length - len(now["input_ids"])
            rows.append(
                {
                    "input_ids": now["input_ids"] + [0] * fill,
                    "attention_mask": now["attention_mask"] + [0] * fill,
                    "labels": now["labels"] + [-100] * fill,
                    "position_ids": now["position_ids"] + list(range(fill)),
                }
            )
        for values in now:
            now[values] = []

    for k in range(len(made)):
        begin, end = made.bounds(k)
        own = made.ids[begin:end].tolist()
        if not len(now["input_ids"]) + len(own) < length:
            close()
        now["input_ids"] += [*own, END]
        now["attention_mask"] += [1] * (len(own) + 1)
        now["labels"] += [i if m else -100 for i, m in zip(own, made.learned[begin:end], strict=True)] + [-100]
        now["position_ids"] += list(range(len(own) + 1))
    close()
    return rows


@pytest.mark.parametrize("seed", range(8))
def test_packed_rows(seed: int) -> None:
    length = 32
    made = examples([random.Random(seed).randint(1, length - 1) for _ in range(40)], seed)
    rows = packing.PackedRows(made, length, END, separate=True)
    found = [{name: values.tolist() for name, values in rows[k].items()} for k in range(len(rows))]
    assert found == packed_by_hand(made, length)
    plain = packing.PackedRows(made, length, END)
    assert "position_ids" not in plain[0] and torch.equal(plain[3]["labels"], rows[3]["labels"])
    assert sum(int(r["attention_mask"].sum()) for r in plain) == len(made.ids) + len(made)


def test_padded_rows() -> None:
    made = examples([5, 8, 1])
    rows = packing.PaddedRows(made, 8)
    assert len(rows) == 3
    for k, (begin, end) in enumerate([(0, 5), (5, 13), (13, 14)]):
        fill = 8 - (end - begin)
        assert rows[k]["input_ids"].tolist() == made.ids[begin:end].tolist() + [0] * fill
        assert rows[k]["attention_mask"].tolist() == [1] * (end - begin) + [0] * fill
        wanted = [i if m else -100 for i, m in zip(made.ids[begin:end].tolist(), made.learned[begin:end], strict=True)]
        assert rows[k]["labels"].tolist() == wanted + [-100] * fill
        assert all(values.dtype == torch.int64 for values in rows[k].values())


def test_no_examples() -> None:
    assert len(packing.PackedRows(examples([]), 8, END)) == 0
