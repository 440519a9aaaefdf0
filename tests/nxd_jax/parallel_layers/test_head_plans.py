"""Heads on ranks that they do not divide by."""

from __future__ import annotations

import pytest
import torch

from nxd_jax.tensor_parallel.head_plans import GQA, arranged, plan

MHA, COPIES = GQA.CONVERT_TO_MHA, GQA.REPLICATE_TO_TP_DEGREE


def test_copies_for_every_rank() -> None:
    found = plan(6, 2, 4)
    assert found.query == (0, 1, 2, None, 3, 4, 5, None)
    assert found.kv == (0, 0, 1, 1)
    assert (found.strategy, found.group) == (COPIES, 2)


def test_a_head_for_every_query_head() -> None:
    found = plan(6, 3, 4)
    assert found.query == (0, 1, 2, 3, 4, 5, None, None)
    assert found.kv == (0, 0, 1, 1, 2, 2, None, None)
    assert (found.strategy, found.group) == (MHA, 1)


def test_the_originals_counts() -> None:
    """Of `get_shardable_head_counts`' comments: 56 heads and 8 K/V heads on 32 ranks."""
    for wanted, kv in ((None, 32), (MHA, 64)):
        found = plan(56, 8, 32, wanted)
        assert (len(found.query), len(found.kv)) == (64, kv)


@pytest.mark.parametrize("wanted", [None, MHA, COPIES])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (8, 1), (6, 2), (6, 3), (12, 4), (5, 5), (56, 8)])
def test_every_query_head_meets_its_own(heads: int, kv_heads: int, tp: int, wanted: GQA | None) -> None:
    """On each rank; all of the model's are there once, in their order, and ranks have equally many."""
    found = plan(heads, kv_heads, tp, wanted)
    assert len(found.query) % tp == 0 and len(found.kv) % tp == 0
    assert [h for h in found.query if h is not None] == list(range(heads))
    q, kv = len(found.query) // tp, len(found.kv) // tp
    for place, head in enumerate(found.query):
        rank, own = divmod(place, q)
        if head is not None:
            assert found.kv[rank * kv + own // (q // kv)] == head // (heads // kv_heads)


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="6 attention heads must be a multiple of 4 K/V heads"):
        plan(6, 4, 2)


def test_arranged() -> None:
    full = torch.arange(6.0).reshape(6, 1)
    found = arranged(full, (2, None, 0, 0), 3)
    assert found[:, 0].tolist() == [4, 5, 0, 0, 0, 1, 0, 1]
    assert arranged(full.t(), (1, 2), 3, dim=1).tolist() == [[2, 3, 4, 5]]
    assert arranged(full, (0, 1, 2), 3) is full
    with pytest.raises(RuntimeError, match="does not hold 4 heads along dim 0"):
        arranged(full, (0, 1), 4)
