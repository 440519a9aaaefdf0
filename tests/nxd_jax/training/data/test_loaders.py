"""Which samples a rank reads, and that a loader goes on where it was told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from nxd_jax.training.data.loaders import SampleLoader, SetLoader, StreamLoader
from nxd_jax.training.data.rows import Rows, Rules
from nxd_jax.training.data.streams import Stream
from tests.nxd_jax.training.data import corpus

ROWS = 23
RULES = Rules("data.train_dir=/set")


def of_set(dp: int = 1, rank: int = 0, size: int = 4, shuffle: bool = False, rows: int = ROWS, epoch: int = 0) -> SampleLoader:
    made = SetLoader(Rows(corpus.numbers(rows), RULES), dp, rank, size, shuffle, seed=5)
    made.order.set_epoch(epoch)
    return made


def of_stream(dp: int = 1, rank: int = 0, size: int = 4, rows: int = ROWS) -> SampleLoader:
    def tables() -> Iterator[pa.Table]:
        data = corpus.numbers(rows).with_format("arrow")
        for begin in range(0, rows, 5):
            yield data[begin : begin + 5]

    return StreamLoader(Stream(tables, RULES), dp, rank, size)


KINDS: dict[str, Callable[..., SampleLoader]] = {
    "set": of_set,
    "shuffled": lambda *args, **options: of_set(*args, shuffle=True, **options),
    "stream": of_stream,
}


def first_ids(batches: Any) -> list[list[int]]:
    return [batch["input_ids"][:, 0].tolist() for batch in batches]


def whole(kind: str, dp: int, size: int = 4, **options: Any) -> list[list[int]]:
    """The global batches, from all ranks' loaders."""
    ranks = [first_ids(KINDS[kind](dp, rank, size, **options)) for rank in range(dp)]
    return [[value for row in zip(*batches, strict=True) for value in row] for batches in zip(*ranks, strict=True)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_rows_are_those_of_distributed_sampler(dp: int, shuffle: bool) -> None:
    for rank in range(dp):
        rows = Rows(corpus.numbers(ROWS), RULES)
        sampler = DistributedSampler(rows, dp, rank, shuffle=shuffle, seed=5, drop_last=True)
        sampler.set_epoch(3)
        wanted = DataLoader(rows, 4 // dp, sampler=sampler, drop_last=True)
        made = of_set(dp, rank, shuffle=shuffle, epoch=3)
        assert len(made) == len(wanted) == 5
        for batch, other in zip(made, wanted, strict=True):
            torch.testing.assert_close(batch, other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_ranks_reads_the_same_global_batches(kind: str) -> None:
    assert whole(kind, 1) == whole(kind, 2) == whole(kind, 4)
    if kind != "shuffled":
        assert whole(kind, 2) == [list(range(k, k + 4)) for k in range(0, 20, 4)]


@pytest.mark.parametrize("kind", KINDS)
def test_going_on(kind: str) -> None:
    """From any batch, at another number of ranks."""
    wanted = whole(kind, 1)
    for taken in range(1, 5):
        before = KINDS[kind](2, 1)
        batches = iter(before)
        for _ in range(taken):
            next(batches)
        after = KINDS[kind](1, 0)
        after.load_state_dict(before.state_dict())
        found = first_ids(after)
        assert found == wanted[taken:]
        assert first_ids(after) == wanted  # the pass after that begins at the beginning
        if kind != "stream":
            assert len(after) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_going_on_with_another_batch_size(kind: str) -> None:
    samples = [value for batch in whole(kind, 1) for value in batch]
    before = KINDS[kind](1, 0, 4)
    batches = iter(before)
    next(batches), next(batches)
    after = KINDS[kind](2, 0, 6)
    after.load_state_dict(before.state_dict())
    if kind != "stream":
        assert len(after) == 3
    assert first_ids(after) == [samples[8:14:2], samples[14:20:2]]


def test_a_pass_that_has_ended() -> None:
    made = of_set(shuffle=True)
    list(made)
    after = of_set(shuffle=True, epoch=1)
    after.load_state_dict(made.state_dict())
    assert first_ids(after) == first_ids(of_set(shuffle=True, epoch=1))


@pytest.mark.parametrize("kind", KINDS)
def test_less_than_a_larger_batch_is_left(kind: str) -> None:
    """Then nothing is left of the pass."""
    before = KINDS[kind](1, 0)
    batches = iter(before)
    for _ in range(4):
        next(batches)
    after = KINDS[kind](1, 0, 8)
    after.load_state_dict(before.state_dict())
    assert first_ids(after) == []
    assert first_ids(after) == first_ids(KINDS[kind](1, 0, 8))


def test_what_a_loader_is_told_holds() -> None:
    made = of_set(size=2)
    made.begin(20)
    made.load_state_dict({"samples": 20, "global_batch_size": 4})  # which had ended
    assert first_ids(made) == [[20, 21]]
    made.load_state_dict({"samples": 18, "global_batch_size": 2})
    assert first_ids(made) == [[18, 19], [20, 21]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_that_is_left_early(kind: str) -> None:
    made = KINDS[kind](1, 0)
    made.begin(8)
    batches = iter(made)
    wanted = whole(kind, 1)
    assert first_ids([next(batches)]) == [wanted[2]]
    assert first_ids(made) == wanted
    assert made.state_dict()["samples"] == 20


def test_too_few_rows() -> None:
    words = "data.train_dir=/set has 3 rows, and a step needs data.global_batch_size=4: give more rows, or set data.global_batch_size to 3 at most"
    with pytest.raises(ValueError, match=words):
        of_set(rows=3)
    with pytest.raises(ValueError, match=words):
        next(iter(of_stream(rows=3)))
    with pytest.raises(ValueError, match="has no rows, and a step needs data.global_batch_size=4: give more rows$"):
        of_set(rows=0)
    with pytest.raises(ValueError, match="has 1 row, and"):
        of_set(rows=1)


def test_a_row_of_a_stream_that_does_not_fit() -> None:
    def tables() -> Iterator[pa.Table]:
        yield pa.table({"input_ids": [[1, 2], [3, 4]]})
        yield pa.table({"input_ids": [[1, 2], [3]]})

    made = StreamLoader(Stream(tables, Rules("data.train_dir=/set", 2)), 1, 0, 1)
    with pytest.raises(ValueError, match="row 3 of data.train_dir=/set has 1 numbers"):
        list(made)
