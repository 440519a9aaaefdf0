"""Seeds that differ by rank, around what Lightning does with random states."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import seed_everything
from pytorch_lightning.utilities.seed import isolate_rng

import torch_bridge
from tests.nxd_jax.lightning import jobs
from torch_bridge.mesh import rank_numbers, world

pytestmark = jobs.MARKS


def draws() -> list[list[float]]:
    """Python's, NumPy's and torch's next number of each of two ranks."""
    numbers = [[float(rank_numbers.own(x, k)) for k in range(2)] for x in (random.random(), np.random.rand())]
    return [*numbers, [t.item() for t in torch_bridge.shards(torch.rand(1).to("xla"))]]


class Seeded(jobs.Module):
    """Each rank draws after its own seed, which is set before Lightning's check of validation."""

    def configure_optimizers(self) -> Any:
        seed_everything(5 + world.rank(), verbose=False)
        return super().configure_optimizers()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        draws()
        super().validation_step(batch, batch_idx)

    def on_train_start(self) -> None:
        self.drawn = draws()


@pytest.mark.parametrize("checked", [0, 2])
def test_a_check_of_validation_draws_nothing(tmp_path: Path, checked: int) -> None:
    module = jobs.module(Seeded)
    made = jobs.trainer(tmp_path, devices=2, max_steps=1, num_sanity_val_steps=checked)
    made.fit(module, jobs.loader(), jobs.loader())
    python = [random.Random(5 + k).random() for k in range(2)]
    numpy = [np.random.RandomState(5 + k).rand() for k in range(2)]
    first = [torch.rand(1, generator=torch.Generator().manual_seed(5 + k)).item() for k in range(2)]
    assert module.drawn == [python, numpy, first]


def test_isolation(tmp_path: Path) -> None:
    jobs.trainer(tmp_path, devices=2).validate(jobs.module(), jobs.loader(), verbose=False)  # lays ranks out
    seed_everything(5 + world.rank(), verbose=False)
    draws()
    with isolate_rng():
        wanted = draws()
    assert draws() == wanted
