"""A module trained by all ranks, with and without `torch_bridge.optimize`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_xla.core.xla_model as xm
from torch import nn

import torch_bridge
from torch_bridge.recorder import sharded
from torch_bridge.runtime import executor


def batch(k: int) -> torch.Tensor:
    """Of step k, another for each dp rank."""
    return sharded.from_ranks(lambda rank: torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * k + rank)), ("dp",))


def trained(
    make: Callable[[], nn.Module], given: Callable[[int], tuple[torch.Tensor, ...]], steps: int, optimize: bool
) -> tuple[list[Any], nn.Module]:
    """For each step what every rank has of the results and of the weight of `net`; and the module. given: the arguments of step k; the loss is taken of the
    first result."""
    torch.manual_seed(0)
    model = make().to("xla")
    if optimize:
        torch_bridge.optimize(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for k in range(steps):
        out = model(*given(k))
        results = out if isinstance(out, tuple) else (out,)
        optimizer.zero_grad()
        results[0].square().mean().backward()
        xm.optimizer_step(optimizer)
        executor.sync()
        found.append([[t.tolist() for t in sharded.shards(a.detach())] for a in (*results, model.net.weight)])
    return found, model
