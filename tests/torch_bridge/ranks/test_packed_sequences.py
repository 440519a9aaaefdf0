"""Packed sequences in a world of several ranks."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import rnn

from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.recorder import sharded

UNSORTED = [2, 5, 1, 3]


def test_data_may_differ_by_rank_and_lengths_may_not(hosted: Hosted) -> None:
    hosted(2, dp=2)
    own = [torch.randn(4, 5, 3) for _ in range(2)]
    x = sharded.from_ranks(lambda r: own[r], ("dp",))
    packed = rnn.pack_padded_sequence(x, UNSORTED, True, enforce_sorted=False)
    back, _ = rnn.pad_packed_sequence(packed, True)
    for mine, data, y in zip(own, sharded.shards(packed.data), sharded.shards(back), strict=True):
        wanted = rnn.pack_padded_sequence(mine, UNSORTED, True, enforce_sorted=False)
        assert torch.equal(data, wanted.data)
        assert torch.equal(y, rnn.pad_packed_sequence(wanted, True)[0])
    lengths = sharded.from_ranks(lambda r: torch.tensor([3 + r, 2, 1, 1]), ("dp",)).cpu()
    with pytest.raises(RuntimeError, match=r"differ by rank .*mask"):
        rnn.pack_padded_sequence(x, lengths, True)
