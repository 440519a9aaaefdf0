"""`torch_bridge.optimize` in worlds of several ranks, of modules that take values from the host: the same for all ranks, or each rank's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.torch_bridge.ranks.conftest import Hosted
from tests.torch_bridge.ranks.training import batch, trained
from torch_bridge.recorder import sharded
from torch_bridge.replay.player import Player


class Shifted(nn.Module):
    """A layer, with numbers from the host, and the rank's own among them."""

    def __init__(self, own: bool):
        super().__init__()
        self.net = nn.Linear(6, 6)
        self.own = own

    def forward(self, x: torch.Tensor) -> Any:
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], device=x.device)
        y = self.net(x) * scale
        if self.own:
            y = y * sharded.from_ranks(lambda rank: torch.full((6,), 1.0 + rank), ("tp",))
        return y * torch.tensor(2.0, device=x.device), scale


@pytest.mark.parametrize("own", [False, True], ids=["for all ranks", "the rank's own"])
def test_values_from_the_host(hosted: Hosted, own: bool) -> None:
    hosted(4, dp=2, tp=2)
    expected, _ = trained(lambda: Shifted(own), lambda k: (batch(k),), 6, optimize=False)
    found, model = trained(lambda: Shifted(own), lambda k: (batch(k),), 6, optimize=True)
    assert found == expected
    player = model.forward
    assert isinstance(player, Player) and player.played > 1 and not player.off
