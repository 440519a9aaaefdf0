"""Small models, and training them with each rank's own batches: wrapped, by plain data parallelism, or on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_xla.core.xla_model as xm
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP
from torch_xla.distributed.fsdp import consolidate_sharded_state_dicts

from torch_bridge.collectives import object_collectives
from torch_bridge.recorder import sharded
from torch_bridge.runtime import executor

Wrap = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    def __init__(self, size: int = 6):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.Linear(2 * size, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, blocks, and a head, which may be tied to the embedding. Sizes divide by no number of ranks."""

    def __init__(self, blocks: int = 2, tied: bool = False):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(6, 11, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.roll(-1, 1).flatten())


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def ids(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def batch(step: int) -> torch.Tensor:
    """Of one step, another for each rank."""
    return sharded.from_ranks(lambda rank: ids(step, rank), ("dp",))


def nested(model: Net, inner: Callable[[nn.Module], nn.Module] = lambda m: m, **options: Any) -> nn.Module:
    """Each block wrapped, and the model around them."""
    for k, block in enumerate(model.blocks):
        model.blocks[k] = FSDP(inner(block), **options)
    return FSDP(model, **options)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(3)) -> list[list[float]]:
    """Every rank's loss in each step."""
    found = []
    for k in steps:
        optimizer.zero_grad()
        loss = model(batch(k))
        loss.backward()
        if isinstance(model, FSDP):
            optimizer.step()
        else:
            xm.optimizer_step(optimizer)
        executor.sync()
        found.append([t.item() for t in sharded.shards(loss.detach())])
    return found


def alone(model: nn.Module, ranks: int, steps: range = range(3), optimize: Callable[[nn.Module], torch.optim.Optimizer] = adam) -> Any:
    """The losses of each rank's batches, and the state, where one device (eager torch) trains on all batches."""
    optimizer = optimize(model)
    found = []
    for k in steps:
        optimizer.zero_grad()
        losses = [model(ids(k, rank)) for rank in range(ranks)]
        (sum(losses) / ranks).backward()
        optimizer.step()
        found.append([loss.item() for loss in losses])
    return found, model.state_dict()


def whole(model: FSDP) -> dict[str, torch.Tensor]:
    """The state dict of the module without wrappers, on the CPU."""
    states = object_collectives.each_ranks(dict(model.state_dict()))
    return consolidate_sharded_state_dicts(states, model.get_shard_metadata())


def assert_close(
    found: tuple[Any, dict[str, torch.Tensor]], expected: tuple[Any, dict[str, torch.Tensor]], tolerance: float = 1e-4
) -> None:
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=tolerance, atol=tolerance)
    assert set(found[1]) == set(expected[1])
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")
