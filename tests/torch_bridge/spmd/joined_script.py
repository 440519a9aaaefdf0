"""A training by annotations, for one process or several: `joined_script.py FOLDER`. Writes what each process saw."""

from __future__ import annotations

import json
import os
import pathlib
import sys

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.experimental.distributed_checkpoint as xc
import torch_xla.runtime as xr
from torch import nn
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel as FSDPv2

folder = pathlib.Path(sys.argv[1])
xr.use_spmd()
count = xr.global_runtime_device_count()
index, processes = xr.process_index(), xr.process_count()
mesh = xs.Mesh(range(count), (count,), ("fsdp",))

torch.manual_seed(0)
model = FSDPv2(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4)), mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(1)
batches = [torch.randn(16, 8, generator=generator) for _ in range(4)]
rows = 16 // processes
own = [batch[index * rows : (index + 1) * rows] for batch in batches]
spec = xs.ShardingSpec(mesh, ("fsdp", None), minibatch=True)
losses, shapes = [], []
for x in pl.MpDeviceLoader(own, "xla", input_sharding=spec):
    shapes.append(list(x.shape))
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    losses.append(loss.item())

manager = xc.CheckpointManager(folder / "steps", save_interval=1)
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
saved = manager.save(4, state)
xm.save(model.state_dict(), folder / "whole.pt", global_master=True)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
manager.restore(4, state)
weight = model[0].weight
shards = xs.wrap_as_sharded_tensor(weight).local_shards
found = {
    "losses": losses,
    "shapes": shapes,
    "weight": weight.cpu().tolist(),
    "shard": list(shards[0].data.shape),
    "devices": [s.shard_device for s in shards],
    "counts": [
        count,
        xr.addressable_runtime_device_count(),
        xr.process_count(),
        xr.global_ordinal(),
        int(xm.is_master_ordinal(local=False)),
    ],
    "saved": saved,
}
(folder / f"process_{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found))
