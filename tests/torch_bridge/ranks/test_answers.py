"""Branches on small integers in worlds of several ranks: decided on the host where all ranks get the same answer, also in modules that are played."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.torch_bridge.ranks.conftest import Hosted
from tests.torch_bridge.ranks.training import batch, trained
from torch_bridge import metrics
from torch_bridge.recorder import sharded
from torch_bridge.replay.player import Player
from torch_bridge.runtime import executor


class Masked(nn.Module):
    """Takes another way where nothing is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.net(x)
        return y if mask.all() else y * mask[..., None]


def _masks(k: int, rank: int) -> torch.Tensor:
    mask = torch.ones(4, dtype=torch.long)
    if k % 3 == 2:
        mask[rank % 4 :] = 0
    return mask


def _given(k: int) -> tuple[torch.Tensor, ...]:
    return batch(k), sharded.from_ranks(lambda rank: _masks(k, rank), ("dp",))


@pytest.mark.parametrize("axes", [dict(dp=2, tp=2), dict(dp=4)], ids=str)
def test_every_rank_gets_the_same_answer(hosted: Hosted, axes: dict[str, int]) -> None:
    """Each rank has a batch of its own: no step is cut, and both ways are played."""
    hosted(4, **axes)
    executor.sync()
    ran = metrics.EXECUTE_TIME.count
    expected, _ = trained(Masked, _given, 12, optimize=False)
    assert metrics.EXECUTE_TIME.count - ran == 12
    found, model = trained(Masked, _given, 12, optimize=True)
    assert metrics.EXECUTE_TIME.count - ran == 24
    assert found == expected
    player = model.forward
    assert isinstance(player, Player) and player.played >= 5 and not player.off  # one more is checked


def test_numbers_are_those_of_each_rank_alone(hosted: Hosted) -> None:
    hosted(4, dp=4)
    model = Masked().to("xla")
    weight, bias = model.net.weight.detach().cpu(), model.net.bias.detach().cpu()
    for k in (0, 2):
        x = sharded.from_ranks(lambda rank: torch.full((4, 6), 1.0 + rank), ("dp",))
        y = model(x, sharded.from_ranks(lambda rank, k=k: _masks(k, rank), ("dp",)))
        for rank, got in enumerate(sharded.shards(y)):
            alone = torch.nn.functional.linear(torch.full((4, 6), 1.0 + rank), weight, bias) * _masks(k, rank)[:, None]
            torch.testing.assert_close(got, alone)
