"""Gradient scalers with torch's own optimizers on divided models: an inf in one rank's part, or at one pipeline stage, skips the step of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch_xla
from neuronx_distributed.parallel_layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed.pipeline import NxDPPModel
from torch import nn
from torch_xla.amp import GradScaler

from nxd_jax.tensor_parallel import scaled_steps
from tests.nxd_jax.conftest import Nxd
from torch_bridge.optimizers.scaled_steps import stepping_with
from torch_bridge.recorder import sharded

FACTORS = (1.0, math.inf, 1.0, math.nan, 1.0)
"""What the last entry of the output is multiplied by, by step."""
SCALERS = pytest.mark.parametrize("scaler_of", [lambda **k: torch.amp.GradScaler("xla", **k), GradScaler], ids=["torch", "torch_xla"])


class Net(nn.Module):
    """Only the last row of `head.weight`, which one rank holds, gets the factor's inf."""

    def __init__(self, column: Callable[..., nn.Module], row: Callable[..., nn.Module], head: Callable[..., nn.Module]):
        super().__init__()
        self.up, self.down, self.norm, self.head = column(4, 8), row(8, 4), nn.LayerNorm(4), head(4, 4, bias=False)

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.down(torch.relu(self.up(x))))
        return (self.head(h.detach()) * factor + h * h).mean()


def train(loss_of: Callable[[int, float, Any], Any], optimizer: torch.optim.Optimizer, scaler: Any) -> list[set[float]]:
    """Scales after each step, of all ranks."""
    scales = []
    for step, factor in enumerate(FACTORS):
        optimizer.zero_grad()
        loss_of(step, factor, scaler)
        scaler.step(optimizer)
        scaler.update()
        torch_xla.sync()
        on_xla = scaler._scale.device.type == "xla"
        scales.append({s.item() for s in (sharded.shards(scaler._scale) if on_xla else [scaler._scale])})
    return scales


def batch(step: int, rows: int = 3) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * 4).reshape(rows, 4) * (1 + step)


def backward(model: nn.Module, device: str) -> Callable[[int, float, Any], Any]:
    def run(step: int, factor: float, scaler: Any) -> None:
        scaler.scale(model(batch(step).to(device), torch.tensor([1, 1, 1, factor]).to(device))).backward()

    return run


def alone() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)


@SCALERS
def test_tensor_parallel_ranks_skip_together(nxd: Nxd, scaler_of: Any) -> None:
    """Parameters that ranks have whole stay equal, and nobody warns that they might not."""
    torch.manual_seed(0)
    reference = Net(nn.Linear, nn.Linear, nn.Linear)
    expected = train(backward(reference, "cpu"), torch.optim.AdamW(reference.parameters(), lr=0.05), alone())
    nxd(2, tp=2)
    torch.manual_seed(0)
    model = Net(
        lambda *a: ColumnParallelLinear(*a, gather_output=False, device="xla"),
        lambda *a: RowParallelLinear(*a, input_is_parallel=True, device="xla"),
        lambda *a, **k: ColumnParallelLinear(*a, **k, device="xla"),
    ).to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    assert train(backward(model, "xla"), optimizer, scaler_of(init_scale=8.0, growth_interval=1)) == expected
    assert expected == [{16.0}, {8.0}, {16.0}, {8.0}, {16.0}]
    _check(reference, model.named_parameters())


class Stages(nn.Module):
    """The factor reaches the weights of the last stage only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return ((self.head(x.detach()) * factor).mean() + x.square().mean()) * scale.mean()


@SCALERS
def test_pipeline_stages_skip_together(nxd: Nxd, scaler_of: Any) -> None:
    torch.manual_seed(0)
    reference = Stages()

    def of_halves(step: int, factor: float, scaler: Any) -> None:
        halves = [reference(x, torch.ones(1), torch.full((4, 1), factor)) for x in batch(step, 8).chunk(2)]
        scaler.scale(torch.stack(halves).mean()).backward()

    expected = train(of_halves, torch.optim.SGD(reference.parameters(), lr=0.05), alone())
    nxd(2, pp=2)
    torch.manual_seed(0)
    model = NxDPPModel(
        Stages(),
        transformer_layer_cls=nn.Linear,
        num_microbatches=2,
        output_loss_value_spec=True,
        input_names=["x", "scale", "factor"],
        pipeline_cuts=["layers.1"],
    )

    def of_pipeline(step: int, factor: float, scaler: Any) -> None:
        model.run_train(x=batch(step, 8), scale=scaler.scale(torch.ones(8, 1, device="xla")), factor=torch.full((8, 1), factor))

    optimizer = torch.optim.SGD(list(model.local_parameters()), lr=0.05)
    assert train(of_pipeline, optimizer, scaler_of(init_scale=8.0, growth_interval=1)) == expected
    _check(reference, model.local_named_parameters())


def test_whole_models_ask_nobody(nxd: Nxd) -> None:
    """A model that some ranks train alone, as in a script that tells ranks apart, must not wait for others."""
    nxd(2, tp=2)
    assert stepping_with(torch.optim.SGD(nn.Linear(2, 2).to("xla").parameters())) == []
    assert scaled_steps.together(torch.optim.SGD(ColumnParallelLinear(2, 2).to("xla").parameters())) == (None,)


def test_a_rank_without_gradients_has_an_answer(nxd: Nxd) -> None:
    """Others wait for it."""
    nxd(2, tp=2)
    scaler = GradScaler()
    scaler.scale(torch.ones(1, device="xla"))
    optimizer = torch.optim.SGD(ColumnParallelLinear(2, 2).to("xla").parameters())
    scaler.unscale_(optimizer)
    (found,) = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
    assert found.item() == 0


def _check(reference: nn.Module, found: Iterable[tuple[str, torch.Tensor]]) -> None:
    whole = dict(reference.named_parameters())
    for name, p in found:
        for rank, part in enumerate(sharded.shards(p.detach())):
            expected = whole[name].detach()
            for dim, n in enumerate(part.shape):
                expected = expected.narrow(dim, rank * n % expected.shape[dim], n)
            torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-5)  # counts on the device are float32
