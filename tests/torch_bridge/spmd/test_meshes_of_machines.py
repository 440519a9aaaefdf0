"""Meshes of one, two and several axes, between machines, too: losses and weights of one device, with tied and frozen weights and an adapter (LoRA)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from torch import nn
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel as FSDPv2


class Adapted(nn.Module):
    """An embedding tied to the head, and a frozen layer with an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(32, 16), nn.Linear(16, 16).requires_grad_(False)
        self.a, self.b = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(x + self.layer(x) + self.b(self.a(x)))


def one_axis(model: nn.Module) -> tuple[nn.Module, xs.Mesh, Any]:
    mesh = xs.Mesh(range(8), (8,), ("fsdp",))
    return FSDPv2(model, mesh=mesh), mesh, "fsdp"


def two_axes(model: Any) -> tuple[nn.Module, xs.Mesh, Any]:
    """Tensor parallelism by hand, along the second."""
    mesh = xs.Mesh(range(8), (4, 2), ("data", "model"))
    model.to("xla")
    xs.mark_sharding(model.embed.weight, mesh, ("model", None))
    xs.mark_sharding(model.layer.weight, mesh, (None, "model"))
    return model, mesh, "data"


def machines(model: nn.Module) -> tuple[nn.Module, xs.Mesh, Any]:
    """Two machines of four devices: copies between them, shards within."""
    mesh = xs.HybridMesh(ici_mesh_shape=(1, 4), dcn_mesh_shape=(2, 1), axis_names=("data", "fsdp"))
    return FSDPv2(model, mesh=mesh, extra_data_axis="data"), mesh, ("data", "fsdp")


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("divide", [one_axis, two_axes, machines])
def test_losses_are_those_of_one_device(divide: Callable[[nn.Module], Any], mesh: xs.Mesh) -> None:
    """Gradients of two batches are added up."""
    torch.manual_seed(0)
    reference = Adapted()
    model, on, axes = divide(copy.deepcopy(reference))
    losses: list[list[float]] = []
    for m in (reference, model):
        optimizer = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01)
        losses.append([])
        for step in range(3):
            optimizer.zero_grad()
            for part in range(2):
                ids = torch.randint(0, 32, (16, 4), generator=torch.Generator().manual_seed(10 * step + part))
                if m is model:
                    ids = ids.to("xla")
                    xs.mark_sharding(ids, on, (axes, None))
                loss = nn.functional.cross_entropy(m(ids).flatten(0, 1), ids.flatten()) / 2
                loss.backward()
            optimizer.step()
            torch_xla.sync()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    inner = getattr(model, "module", model)
    assert inner.head.weight is inner.embed.weight and inner.layer.weight.grad is None
    for p, q in zip(reference.parameters(), inner.parameters(), strict=True):
        torch.testing.assert_close(q.cpu(), p, rtol=1e-3, atol=1e-5)
