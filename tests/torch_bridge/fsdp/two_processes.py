"""What `test_processes` runs in one process with two ranks, and in two processes: python two_processes.py <directory>."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_backend  # noqa: F401  # the backend "xla"
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP

import torch_bridge
from torch_bridge.mesh import sharding
from torch_bridge.recorder import sharded

folder = pathlib.Path(sys.argv[1])
dist.init_process_group("xla", init_method="xla://")
rank = xm.get_ordinal()
torch.manual_seed(0)
inner: Any = FSDP(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)))
model: Any = FSDP(nn.Sequential(inner, nn.Linear(5, 3)), disable_reshard_on_root=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
losses, norms = [], []
for step in range(13):  # the last ones are played
    x = torch.arange(20.0).view(4, 5).to("xla") * (rank + 1) / (step + 10)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    norms.append(model.clip_grad_norm_(0.5).item())
    optimizer.step()
    xm.mark_step()
    losses.append([t.item() for t in sharded.shards(loss.detach())])
ckpt = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata(), "optimizer": optimizer.state_dict()}
xm.save(ckpt, folder / f"final_rank-{rank}-of-{xm.xrt_world_size()}.pth", master_only=False)
found: dict[str, Any] = {"losses": losses, "norms": norms, "played": model.forward.played}
xm.rendezvous("saved")
own = torch_bridge.each_rank(lambda r: torch.load(folder / f"final_rank-{r}-of-2.pth"), rank)
model.load_state_dict(own["model"])
optimizer.load_state_dict(own["optimizer"])
found["labels"] = [str(sharding.label(p._storage.held)) for p in model.parameters()]
total = sum(p.detach().square().sum() for p in model.parameters())
found["whole"] = model.all_reduce_op(xm.REDUCE_SUM, total).item()
for p in model.parameters():
    p.data.zero_()
model(torch.ones(1, 5).to("xla")).sum().backward()
optimizer.step()
xm.mark_step()
(folder / f"found-{int(rank)}.json").write_text(json.dumps(found))
xm.rendezvous("end")
