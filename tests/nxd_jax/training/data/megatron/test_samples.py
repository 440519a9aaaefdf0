"""Samples against plain loops over the text, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nxd_jax.training.data.megatron.samples import COLUMNS, GPTSamples, Rules
from tests.nxd_jax.training.data.megatron import corpora, loops


def expected(ids: list[int], seq_length: int, extra: int, *, reset: bool, mask_eod: bool) -> dict[str, list[Any]]:
    """What a sample of these tokens is, one place after the other."""
    found: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    position = 0
    for k in range(seq_length):
        here = ids[k] if k < len(ids) else None
        following = ids[k + 1] if k + 1 < len(ids) and (extra or k + 1 < seq_length) else None
        found["tokens"].append(here or 0)
        found["labels"].append(following or 0)
        masked = following is None or (mask_eod and here == corpora.EOD)
        found["loss_mask"].append(0.0 if masked else 1.0)
        found["position_ids"].append(position if reset else k)
        position = 0 if here == corpora.EOD else position + 1
    found["attention_mask"] = [True]
    return found


@pytest.mark.parametrize("extra", [1, 0])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("reset", "mask_eod"), [(False, False), (True, True), (True, False), (False, True)])
def test_samples_are_those_of_plain_loops(reset: bool, mask_eod: bool, drop_last: bool, extra: int, tmp_path: Path) -> None:
    rows = corpora.rows(25)
    prefix = corpora.write(tmp_path / "a", rows)
    made = corpora.samples(
        prefix, 40, extra=extra, drop_last=drop_last, eod=corpora.EOD, reset_position_ids=reset, eod_mask_loss=mask_eod, vocab_size=50
    )
    order, _, shuffle = loops.maps([len(r) for r in rows], range(25), 8, 40, 7, extra, drop_last)
    assert len(made) == len(shuffle) >= 40
    for number, row in enumerate(shuffle):
        ids = loops.text(rows, order, row * 8, 8 + extra)
        found = made[number]
        assert {name: values.tolist() for name, values in found.items()} == expected(ids, 8, extra, reset=reset, mask_eod=mask_eod)
        assert tuple(found) == COLUMNS
        kinds = (torch.int64, torch.int64, torch.float32, torch.bool, torch.int64)
        assert tuple(values.dtype for values in found.values()) == kinds
    rest = (sum(len(rows[d]) for d in order) - extra) % 8
    if not drop_last and rest and not mask_eod:
        short = next(made[number] for number, row in enumerate(shuffle) if row == len(shuffle) - 1)
        assert float(short["loss_mask"].sum()) == rest - (1 - extra)


def test_a_sample_that_only_fills_a_batch(tmp_path: Path) -> None:
    made = corpora.samples(corpora.write(tmp_path / "a", corpora.rows(25)), 10)
    last, filling = made[len(made) - 1], made[-1]
    assert filling["loss_mask"].sum() == 0 < last["loss_mask"].sum()
    assert all(torch.equal(filling[name], last[name]) for name in COLUMNS if name != "loss_mask")
    for number in (len(made), -2):
        with pytest.raises(IndexError, match=rf"a has {len(made)} samples, and no number {number}"):
            made[number]


@pytest.mark.parametrize(("wrong", "dtype"), [(50, np.uint16), (-1, np.int32)])
def test_ids_of_another_vocabulary(wrong: int, dtype: Any, tmp_path: Path) -> None:
    prefix = corpora.write(tmp_path / "a", [[2, 3, 4], [5, 6, 7, wrong, 9], [3] * 8], dtype)
    made = corpora.samples(prefix, 4, vocab_size=50)
    said = f"a: token 3 of document 1 is {wrong}, and ids are 0 to 49 with the vocabulary of data.tokenizer: the set was made with another tokenizer"
    with pytest.raises(ValueError, match=said):
        for number in range(len(made)):
            made[number]


def test_what_cannot_be(tmp_path: Path) -> None:
    prefix = corpora.write(tmp_path / "a", [[1.5, 2.0, 3.0] * 9], np.float32)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="a holds float32 numbers, and token ids are whole numbers"):
        corpora.samples(prefix, 1)
    for key in ("reset_position_ids", "eod_mask_loss"):
        with pytest.raises(ValueError, match=f"data.{key}: True needs a tokenizer with an end of text"):
            Rules(8, **{key: True})


def test_padding_is_no_end_of_a_document() -> None:
    """Though tokens that are missing are 0, as a document's end is here."""
    ids = np.array([4, 5], np.int64)
    found = Rules(4, eod=0, reset_position_ids=True, eod_mask_loss=True).tensors(ids)
    assert found["position_ids"].tolist() == [0, 1, 2, 3] and found["loss_mask"].tolist() == [1, 0, 0, 0]


def test_reading_is_not_the_whole_file(tmp_path: Path) -> None:
    """Tokens are mapped, not loaded."""
    made = corpora.samples(corpora.write(tmp_path / "a", corpora.rows(25)), 4)
    assert isinstance(made, GPTSamples) and isinstance(made.indexed._data, np.memmap)
