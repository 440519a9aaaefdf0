"""`torch_bridge.optimize` on 4 ranks, tp 2: parallel layers, sequence parallelism, ZeRO-1, random trackers, LoRA: the same numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import neuronx_distributed as nxd_api
import pytest
import torch
import torch_xla
from torch import nn

import torch_bridge
from nxd_jax.modules.lora import LoraConfig
from nxd_jax.parallel_layers import parallel_state
from nxd_jax.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from nxd_jax.parallel_layers.random import get_xla_rng_tracker, model_parallel_xla_manual_seed
from tests import quick
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.trainer.runs import Run, Wrapped
from torch_bridge import metrics
from torch_bridge.recorder import sharded
from torch_bridge.replay.player import Player
from torch_bridge.runtime import executor

STEPS = 6


@pytest.fixture(autouse=True, scope="module")
def compile_fast() -> Iterator[None]:
    """Both runs are compiled alike, and only their equality counts."""
    with quick.compiling():
        yield


def player(model: Any) -> Player:
    """What stands in the place of the forward of the wrapped module."""
    found = next(m.forward for m in model.modules() if isinstance(m.__dict__.get("forward"), Player))
    assert isinstance(found, Player)
    return found


def inner(model: Any) -> nn.Module:
    """The module that `initialize_parallel_model` wrapped."""
    found = model.original_module()
    assert isinstance(found, nn.Module)
    return found


def bits(t: torch.Tensor) -> list[bytes]:
    """What every rank holds."""
    return [s.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for s in sharded.shards(t.detach())]


@pytest.mark.switched_on("NXD_JAX_REPLAY")
def test_one_program_from_the_first_step_to_played_ones(nxd: Nxd) -> None:
    """Gradients that are added up in float32 come in another order when a module is played; the program is the same."""

    def make() -> nn.Module:
        return nn.Sequential(
            ColumnParallelLinear(8, 8, gather_output=False), nn.GELU(), RowParallelLinear(8, 8, input_is_parallel=True)
        ).bfloat16()

    nxd(4, tp=2)
    config = nxd_api.neuronx_distributed_config(tensor_parallel_size=2, optimizer_config={"zero_one_enabled": True, "grad_clipping": True})
    model = nxd_api.initialize_parallel_model(config, make)
    optimizer = nxd_api.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=1e-2)
    torch_xla.sync()
    before = metrics.COUNTERS.get("UncachedCompile", 0)
    for _ in range(STEPS):
        model(torch.ones(4, 8, dtype=torch.bfloat16).to("xla")).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
    assert player(model).played > 0
    assert metrics.COUNTERS["UncachedCompile"] - before == 1


def test_training_with_zero1_clipping_and_a_schedule(nxd: Nxd) -> None:
    run = Run(torch.optim.AdamW, {"lr": 1e-2}, scheduler=True, steps=5, accumulate=2)
    found = []
    for optimized in (False, True):
        nxd(run.world, tp=run.tp)
        wrapped = Wrapped(run)
        if optimized:
            torch_bridge.optimize(inner(wrapped.model))
        seen, before = [], metrics.COUNTERS["UncachedCompile"]
        for ids, labels in run.batches():
            seen.append(wrapped.step(ids, labels))
        found.append((seen, {n: bits(p) for n, p in wrapped.model.named_parameters()}, metrics.COUNTERS["UncachedCompile"] - before))
    assert found[0] == found[1]
    assert player(wrapped.model).played and not player(wrapped.model).off


class Parallel(nn.Module):
    """Tensor-parallel layers around dropout. sequence: along the sequence. tracked: dropout that differs among tensor-parallel ranks."""

    def __init__(self, sequence: bool = False, tracked: bool = False):
        super().__init__()
        self.up = ColumnParallelLinear(6, 8, gather_output=False, sequence_parallel_enabled=sequence, sequence_dimension=0)
        self.down = RowParallelLinear(8, 6, input_is_parallel=True, sequence_parallel_enabled=sequence, sequence_dimension=0)
        self.drop = nn.Dropout(0.3)
        self.tracked = tracked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        if self.tracked:
            with get_xla_rng_tracker().fork():
                h = self.drop(h)
        return self.drop(self.down(h))


def trained(nxd: Nxd, make: Callable[[], nn.Module], optimized: bool, lora: LoraConfig | None = None) -> tuple[list[Any], Any]:
    """Losses, gradients and weights of a few steps on batches that differ by data-parallel rank; and the model."""
    nxd(4, tp=2)
    model_parallel_xla_manual_seed(7)
    torch.manual_seed(0)
    config = nxd_api.neuronx_distributed_config(
        tensor_parallel_size=2, optimizer_config={"zero_one_enabled": lora is None}, lora_config=lora
    )
    model = nxd_api.initialize_parallel_model(config, make)
    if optimized:
        torch_bridge.optimize(inner(model))
    optimizer = nxd_api.initialize_parallel_optimizer(
        config, torch.optim.AdamW, [p for p in model.parameters() if p.requires_grad], lr=1e-2
    )
    found: list[Any] = []
    for k in range(STEPS):
        x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(k)).to("xla")[parallel_state.get_data_parallel_rank()]
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        grads = [bits(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        executor.sync()
        found.append((bits(loss), grads, [bits(p) for p in model.parameters()]))
    return found, model


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("name", ["parallel", "sequence", "tracked", "lora"])
def test_parallel_layers(nxd: Nxd, name: str) -> None:
    lora = LoraConfig(lora_rank=2, lora_alpha=4, lora_dropout=0.2, target_modules=["up", "down"]) if name == "lora" else None

    def make() -> nn.Module:
        return Parallel(sequence=name == "sequence", tracked=name == "tracked")

    expected, _ = trained(nxd, make, False, lora)
    found, model = trained(nxd, make, True, lora)
    for k, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert a == b, f"step {k} differs; off: {player(model).off!r}"
    if name == "tracked":
        assert "a generator or a random state of its own" in player(model).off and not player(model).played
    else:
        assert player(model).played == STEPS - 3 and not player(model).off
