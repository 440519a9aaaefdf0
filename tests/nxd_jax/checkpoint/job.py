"""A small job with every kind of parameter: rows and columns shared out, fused pairs, q, k and v, copies, a number, a buffer, sizes that do not divide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import neuronx_distributed as nxd
import torch
import torch_xla
from neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_distributed.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, parallel_state
from torch import nn

from nxd_jax.checkpoint import contents
from nxd_jax.utils.full_weights import gather_full
from torch_bridge.recorder import sharded


class Model(nn.Module):
    def __init__(self, kv: int = 1, fuse: bool = True):
        super().__init__()
        self.embedding = ParallelEmbedding(32, 16)
        self.pair = ColumnParallelLinear(16, 64, gather_output=False, stride=2)
        self.down = RowParallelLinear(32, 16, input_is_parallel=True)
        self.qkv = GQAQKVColumnParallelLinear(16, [16, 8], bias=True, gather_output=True, kv_size_multiplier=kv, fuse_qkv=fuse)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("table", torch.arange(5.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        gate, up = self.pair(h).chunk(2, -1)
        h = h + self.down(torch.tanh(gate) * up)
        q, k, v = self.qkv(h)
        h = nn.functional.dropout(q + torch.cat([k[..., :8], v[..., :8]], -1), 0.1, self.training)
        return nn.functional.cross_entropy(self.head(self.norm(h) * self.scale).flatten(0, 1), y.flatten())


def build(
    tp: int = 1,
    zero1: bool = False,
    kv: int = 1,
    fuse: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    cp: int = 1,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> Any:
    """(model, optimizer, scheduler) in the current world."""
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=tp, context_parallel_size=cp, optimizer_config={"zero_one_enabled": zero1, "max_grad_norm": 0.5}
    )
    torch.manual_seed(seed)
    model = nxd.initialize_parallel_model(config, lambda: Model(kv, fuse).to(dtype))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = nxd.initialize_parallel_optimizer(config, optimizer_class, groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (k + 1))
    return model, optimizer, scheduler


def train(job: Any, first: int, last: int) -> list[float]:
    """Steps of a job; the losses, averaged over the ranks."""
    model, optimizer, scheduler = job
    source = torch.Generator().manual_seed(0)
    x = torch.randint(0, 32, (20, 12, 5), generator=source)
    y = torch.randint(0, 7, (20, 12, 5), generator=source)
    size, rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    losses = []
    for k in range(first, last):
        optimizer.zero_grad()
        loss = model.run_train(x[k].view(size, -1, 5).to("xla")[rank], y[k].view(size, -1, 5).to("xla")[rank])
        optimizer.step()
        scheduler.step()
        torch_xla.sync()
        held = sharded.shards(loss.detach())
        losses.append(sum(v.item() for v in held) / len(held))
    return losses


def _spread(name: str, full: Any) -> dict[str, torch.Tensor]:
    if isinstance(full, tuple):
        return {f"{name.removesuffix('_qkv')}_{k}": t for k, t in zip("qkv", full, strict=True)}
    return {name: full}


def weights(model: Any) -> dict[str, torch.Tensor]:
    """Full weights by name; fused q, k and v apart."""
    found: dict[str, torch.Tensor] = {}
    for name, p in model.named_parameters():
        found.update(_spread(name, gather_full(p)))
    return found


def moments(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Full optimizer state by name, whatever rows a rank holds."""
    found: dict[str, torch.Tensor] = {}
    for part in contents.parts_of(optimizer, contents.names_of(model)):
        for key, value in contents.stepping(optimizer).state[part.held].items():
            if key == "step":
                for name in _spread(part.name, (value,) * 3 if part.name.endswith("_qkv") else value):
                    found[f"step/{name}"] = value.cpu()
                continue
            if part.rows is not None:
                shape = part.parameter.shape
                (value,) = part.rows.all_gather([value], [shape], value.dtype)
            for name, t in _spread(part.name, gather_full(value.reshape(part.parameter.shape), like=part.parameter)).items():
                found[f"{key}/{name}"] = t
    return found


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bits differ, or that only one has."""
    return sorted(set(a) ^ set(b)) + [k for k in a if k in b and not torch.equal(a[k], b[k])]


Make = Callable[..., Any]
