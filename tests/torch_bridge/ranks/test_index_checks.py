"""Indices out of range on some ranks only: the error says on which."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.torch_bridge.ranks.conftest import Hosted
from tests.torch_bridge.test_index_checks import checked
from torch_bridge.recorder import sharded

__all__ = ["checked"]


def test_the_rank_is_named(hosted: Hosted, checked) -> None:
    checked()
    hosted(4, dp=2, tp=2)
    weight = torch.zeros(10, 3, device="xla")
    ids = sharded.from_ranks(lambda r: torch.tensor([1, 10 if r >= 2 else 2]), ("dp",))
    with pytest.raises(IndexError, match=r"aten.embedding: index 10 is out of range on ranks 2, 3: 0 to 9 .*1 of 2 are"):
        F.embedding(ids, weight).cpu()
    own = sharded.from_ranks(lambda r: torch.tensor([1, -1 if r == 1 else 2]))
    with pytest.raises(IndexError, match=r"index -1 is out of range on rank 1: "):
        F.embedding(own, weight).cpu()
    with pytest.raises(IndexError, match=r"index 10 is out of range on ranks 0, 1, 2, 3: "):
        F.embedding(torch.tensor([10], device="xla"), weight).cpu()
