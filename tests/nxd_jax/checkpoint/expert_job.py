"""A small job with mixtures of experts (the model of `modules/moe/training.py`), for checkpoints that go from any layout to any other."""

from __future__ import annotations

import dataclasses
from typing import Any

import neuronx_distributed as nxd
import torch
import torch_xla
from neuronx_distributed.modules.moe import load as expert_load
from torch import nn

from nxd_jax.checkpoint import contents
from nxd_jax.modules.moe.moe_parallel_layers import ExpertFusedColumnParallelLinear, ExpertFusedRowParallelLinear
from nxd_jax.tensor_parallel import parallel_groups
from tests.nxd_jax.checkpoint import job
from tests.nxd_jax.modules.moe.training import EXPERTS, HIDDEN, Layout, Model
from torch_bridge.mesh import world
from torch_bridge.recorder import sharded

__all__ = ["Arrangement", "Layout", "build", "differing", "start", "train", "values"]


def start(nxd_world: Any, layout: Layout) -> None:
    """Lay the ranks out."""
    nxd_world(layout.ranks, tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep)


def build(layout: Layout, seed: int = 0, dtype: torch.dtype = torch.float32, balanced: bool = False) -> Any:
    """(model, optimizer, scheduler): matrices decay, vectors and biases do not. balanced: routers choose by a bias that moves after each step."""
    torch.manual_seed(seed)
    config = layout.config()
    model = nxd.initialize_parallel_model(config, lambda: Model(layout).to(dtype))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, groups, lr=0.01)
    if balanced:
        expert_load.ExpertBalancer(model, rate=0.01).attach(optimizer)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (k + 1))


def train(layout: Layout, made: Any, first: int, last: int) -> list[float]:
    """Steps of a job; the losses of the global batch."""
    model, optimizer, scheduler = made
    losses = []
    for batch in layout.batches()[first:last]:
        given = _local(layout, batch)
        loss = model.run_train(**(given if layout.pp > 1 else {name: t.to("xla") for name, t in given.items()}))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        torch_xla.sync()
        held = sharded.shards(loss.detach().to("xla"))
        losses.append(sum(float(v) for v in held) / len(held))
    return losses


def _local(layout: Layout, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if len(world.current().hosted) > 1:
        return layout.local(batch)
    place = parallel_groups.places("dp")[world.first()]
    return {name: t.chunk(layout.dp)[place] for name, t in batch.items()}


def values(made: Any) -> dict[str, torch.Tensor]:
    """Full weights, buffers, optimizer state and master weights by name, of all experts."""
    model, optimizer, *_ = made
    found = {**job.weights(model), **job.moments(model, optimizer)}
    kept = contents.unwrapped(model).state_dict()
    for name, t in contents.unwrapped(model).named_buffers():
        if name in kept:
            found[f"buffer/{name}"] = t.cpu()
    for part in contents.parts_of(optimizer, contents.names_of(model)):
        if part.held is not part.parameter and part.held.dtype != part.parameter.dtype:
            assert part.rows is not None
            (whole,) = part.rows.all_gather([part.held.detach()], [part.parameter.shape], part.held.dtype)
            found[f"master/{part.name}"] = job.gather_full(whole.reshape(part.parameter.shape), like=part.parameter)
    return {name: t.clone() for name, t in found.items()}


differing = job.differing


class Arranged(nn.Module):
    """Experts with biases that ranks hold in an order of their own, or in the order of their numbers."""

    def __init__(self, experts: int, held: tuple[tuple[int, ...], ...] | None):
        super().__init__()
        how: dict[str, Any] = {"bias": True, "expert_distribution": held}
        self.up = ExpertFusedColumnParallelLinear(experts, HIDDEN, 12, stride=2, **how)
        self.down = ExpertFusedRowParallelLinear(experts, 6, HIDDEN, **how)
        self.norm = nn.Parameter(torch.ones(HIDDEN))


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """A world in which experts are held in an order of their own."""

    ranks: int
    tp: int = 1
    ep: int = 1
    zero1: bool = False
    held: tuple[tuple[int, ...], ...] | None = None
    experts: int = EXPERTS
    cp: int = 1

    def build(self, nxd_world: Any, seed: int = 0) -> Any:
        """(model, optimizer), after a step with gradients of its own for each expert."""
        nxd_world(self.ranks, tp=self.tp, ep=self.ep, cp=self.cp)
        torch.manual_seed(seed)
        config = nxd.neuronx_distributed_config(
            tensor_parallel_size=self.tp,
            expert_parallel_size=self.ep,
            context_parallel_size=self.cp,
            optimizer_config={"zero_one_enabled": self.zero1},
        )
        model = nxd.initialize_parallel_model(config, lambda: Arranged(self.experts, self.held))
        optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.1)
        for p in model.parameters():
            p.grad = p.detach() * 0.5
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        return model, optimizer
