"""What `test_splits` runs in one process or several, each with as many ranks as it is told: python splits_job.py <directory>."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import neuronx_distributed as nxd
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_backend  # the backend "xla"
from neuronx_distributed.parallel_layers import ColumnParallelLinear, RowParallelLinear
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

from torch_bridge.mesh import world
from torch_bridge.recorder import sharded


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = ColumnParallelLinear(6, 16, gather_output=False)
        self.down = RowParallelLinear(16, 2, input_is_parallel=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.up(x).tanh())


def tensor_parallel() -> tuple[Any, Any]:
    """NxD: tensor and data parallelism, ZeRO-1."""
    config = nxd.neuronx_distributed_config(tensor_parallel_size=2, optimizer_config={"zero_one_enabled": True})
    model = nxd.initialize_parallel_model(config, Mlp)
    return model, nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.05)


def fully_sharded() -> tuple[Any, Any]:
    torch.manual_seed(3)
    model: Any = XlaFullyShardedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def main(folder: pathlib.Path, kind: str) -> None:
    dist.init_process_group("xla", init_method="xla://")
    model, optimizer = {"nxd": tensor_parallel, "fsdp": fully_sharded}[kind]()
    number = xm.get_ordinal() // 2 if kind == "nxd" else xm.get_ordinal()  # ranks that share a model get the same
    found = []
    for step in range(10):  # the last ones are played
        x = torch.linspace(-1, 1, 24).view(4, 6).to("xla") * (number + 1) / (step + 1)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        found.append([float(t) for t in sharded.shards(loss.detach())])
    hosted = world.current().hosted
    (folder / f"found_{hosted[0]}.json").write_text(json.dumps(dict(zip(hosted, zip(*found, strict=True), strict=True))))
    xm.rendezvous("end")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
