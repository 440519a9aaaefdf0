"""torch's functions that clip gradients, with a bound that differs by rank: each rank's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import torch_bridge
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.mesh import rank_numbers, world

BOUNDS: dict[str, Callable[[Any], Any]] = {
    "number": lambda rank: 1 + rank,
    "float": lambda rank: 0.5 * rank + 0.5,
    "read": lambda rank: (torch.ones(2, device="xla") * (rank + 1)).sum().item(),
    "read integer": lambda rank: (torch.ones(2, device="xla").long() * (rank + 1)).sum().item(),
}
CLIPS = {
    "norm": lambda p, bound: clip_grad_norm_(p, bound),
    "norm, one by one": lambda p, bound: torch.nn.utils.clip_grad_norm_(p, bound, foreach=False),
    "value": lambda p, bound: torch.nn.utils.clip_grad_value_(p, bound),
    "value, by name": lambda p, bound: clip_grad_value_(p, bound),
}


def _weights(device: str) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.ones(n, device=device)) for n in (2, 3)]
    for w in made:
        w.grad = torch.arange(1.0, len(w) + 1).mul(7).to(device)
    return made


@pytest.fixture
def four_ranks(hosted: Hosted) -> None:
    hosted(4)
    assert rank_numbers.is_ranked(world.rank())


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.usefixtures("four_ranks")
def test_each_ranks_own(clip: str, bound: str) -> None:
    weights = _weights("xla")
    number = BOUNDS[bound](world.rank())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CLIPS[clip](weights, number)
    own = rank_numbers.per_rank(number)
    for rank in range(4):
        alone = _weights("cpu")
        CLIPS[clip](alone, own[rank])
        for w, expected in zip(weights, alone, strict=True):
            torch.testing.assert_close(torch_bridge.shards(w.grad)[rank], expected.grad)


@pytest.mark.usefixtures("four_ranks")
def test_gradients_that_all_share() -> None:
    for clip in CLIPS.values():
        with pytest.raises(rank_numbers.PlainNumberNeeded, match="share: make the tensor on xla"):
            clip(_weights("cpu"), 1 + world.rank())
