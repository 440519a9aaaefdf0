"""What a core holds while it trains is what arithmetic says: 1/n of parameters, gradients and the optimizer's state, and a unit's whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP
from torch_xla.distributed.fsdp import checkpoint_module

from tests.torch_bridge.fsdp.models import adam
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.recorder import sharded
from torch_bridge.runtime import executor, session

SIZE, INNER, BLOCKS, RANKS = 64, 512, 6, 4
UNIT = 2 * SIZE * INNER * 4
"""Bytes of a block's parameters."""


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, INNER, bias=False), nn.Linear(INNER, SIZE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def planned(wrap: Any, steps: int = 2) -> Any:
    """The memory analysis of the last step's program."""
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(*(wrap(Wide()) for _ in range(BLOCKS))))
    optimizer = adam(model)
    for _ in range(steps):
        optimizer.zero_grad()
        x = sharded.from_ranks(lambda rank: torch.full((1, SIZE), float(rank)), ("dp",))
        model(x.requires_grad_()).square().mean().backward()
        optimizer.step()
        executor.sync()
    return session.current().recent[-1].compiled.memory_analysis()


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_core_holds_its_shards_and_one_unit(checkpoints: bool, hosted: Hosted) -> None:
    """AdamW: parameters, two moments and gradients. What is kept of activations is small here."""
    hosted(RANKS)
    plan = planned(lambda m: FSDP(checkpoint_module(m) if checkpoints else m))
    state = plan.argument_size_in_bytes
    kept = state + plan.output_size_in_bytes - plan.alias_size_in_bytes
    assert state == pytest.approx(3 * BLOCKS * UNIT / RANKS, rel=0.01)  # parameters and moments
    assert kept == pytest.approx(4 * BLOCKS * UNIT / RANKS, rel=0.01)  # and gradients
    assert kept + plan.temp_size_in_bytes <= 1.05 * (4 * BLOCKS * UNIT / RANKS + 2 * UNIT)  # a unit's parameters and their whole gradients
    assert plan.temp_size_in_bytes >= UNIT


def test_without_resharding_all_parameters_stay_gathered(hosted: Hosted) -> None:
    hosted(RANKS)
    assert planned(lambda m: FSDP(m, reshard_after_forward=False)).temp_size_in_bytes >= 0.9 * BLOCKS * UNIT


def test_whole_parameters_are_freed_when_they_are_cut(hosted: Hosted) -> None:
    """Before the first step nothing but shards is held."""
    hosted(RANKS)
    model = FSDP(Wide().to("xla"))
    for p in model.parameters():
        assert p.shape == (SIZE * INNER // RANKS,) and not p._storage.pending  # type: ignore[attr-defined]
    assert sharded.varying(next(model.parameters())).axes == ("dp",)
