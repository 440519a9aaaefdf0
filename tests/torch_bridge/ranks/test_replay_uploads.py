"""`torch_bridge.optimize` in worlds of several ranks, of modules that take values from the host: the same for all ranks, or each rank's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm
from torch import nn

import torch_bridge
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge import executor, sharded
from torch_bridge.replay import Player


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


def _trained(own: bool, optimize: bool) -> tuple[list[Any], nn.Module]:
    torch.manual_seed(0)
    model = Shifted(own).to("xla")
    if optimize:
        torch_bridge.optimize(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for k in range(6):
        x = sharded.from_ranks(lambda rank, k=k: torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * k + rank)), ("dp",))
        y, scale = model(x)
        optimizer.zero_grad()
        y.square().mean().backward()
        xm.optimizer_step(optimizer)
        executor.sync()
        found.append([[t.tolist() for t in sharded.shards(a)] for a in (y.detach(), scale, model.net.weight.detach())])
    return found, model


@pytest.mark.parametrize("own", [False, True], ids=["for all ranks", "the rank's own"])
def test_values_from_the_host(hosted: Hosted, own: bool) -> None:
    hosted(4, dp=2, tp=2)
    expected, _ = _trained(own, optimize=False)
    found, model = _trained(own, optimize=True)
    assert found == expected
    player = model.forward
    assert isinstance(player, Player) and player.played > 1 and not player.off
