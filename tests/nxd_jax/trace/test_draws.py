"""Random numbers that a traced model draws on its devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nxd_jax.parallel_layers import layers
from nxd_jax.trace.functions import shard_checkpoint
from nxd_jax.trace.model_builder_v2 import ModelBuilder
from nxd_jax.trace.nxd_model import NxDModel
from nxd_jax.trace.parallel_context import NxDParallelState
from tests.nxd_jax.trace import nets

ROWS = 512
X = torch.ones(ROWS, 4)


class Draws(nn.Module):
    """Dropout on what all ranks have, and rows of a table chosen by the logits of a parallel layer."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.25)
        self.head = layers.ColumnParallelLinear(4, 8, bias=False, gather_output=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.drop(x), torch.multinomial(torch.softmax(self.head(x), -1), 1), torch.rand(3, device=x.device)


WEIGHT = torch.arange(8.0)[:, None].expand(8, 4) / 8


@pytest.fixture(scope="module", params=["mesh", "one"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NxDModel:
    with NxDParallelState(world_size=2, tensor_model_parallel_size=2):
        module = Draws().train()
        found = ModelBuilder(module).trace(X).compile(compiler_workdir=tmp_path_factory.mktemp("draws"))
        weights = shard_checkpoint({"head.weight": WEIGHT}, module)
    nets.put_on(found, request.param)
    found.set_weights(weights)
    found.to_neuron()
    return found


def test_a_seed_repeats_them(model: NxDModel) -> None:
    torch.manual_seed(5)
    first, second = model(X), model(X)
    torch.manual_seed(5)
    assert all(torch.equal(a, b) for a, b in zip(first, model(X), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch.manual_seed(6)
    assert not torch.equal(first[0], model(X)[0])


def test_they_are_distributed_as_they_should_be(model: NxDModel) -> None:
    dropped, chosen, numbers = model(X)
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs((dropped == 0).float().mean() - 0.25) < 0.05
    shares = torch.bincount(chosen.flatten(), minlength=8) / ROWS
    torch.testing.assert_close(shares, torch.softmax(WEIGHT.sum(1), 0), rtol=0, atol=0.07)
    assert chosen.dtype == torch.int64 and ((numbers >= 0) & (numbers < 1)).all()


def test_ranks_agree(model: NxDModel) -> None:
    """As they must where all have the same tensor."""
    for of_ranks in model([X, X], forward_mode="ranked_to_cpu"):
        assert torch.equal(*of_ranks)


def test_both_forms_draw_the_same() -> None:
    found = []
    for form in ("mesh", "one"):
        with NxDParallelState(world_size=2, tensor_model_parallel_size=2):
            module = Draws().train()
            model = ModelBuilder(module).trace(X[:4], tag="a").compile()
            weights = shard_checkpoint({"head.weight": WEIGHT}, module)
        nets.put_on(model, form)
        model.set_weights(weights)
        model.to_neuron()
        torch.manual_seed(7)
        found.append(model(X[:4]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_file_keeps_them(model: NxDModel, tmp_path: Path) -> None:
    model.save(str(tmp_path / "a.pt"), save_weights=True)
    again = NxDModel.load(str(tmp_path / "a.pt"))
    again.to_neuron()
    torch.manual_seed(8)
    wanted = model(X)
    torch.manual_seed(8)
    assert all(torch.equal(a, b) for a, b in zip(wanted, again(X), strict=True))


def test_evaluation_draws_nothing() -> None:
    drop = nn.Dropout(0.5).eval()
    found = ModelBuilder(drop).trace(X[:2]).trace_artifacts_collection
    assert all(one.program.facts.draws == 0 for one in found.values())
