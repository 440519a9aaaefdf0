"""What `test_processes` runs in two processes: python -m torch.distributed.run --nproc_per_node=2 two_processes.py <directory> <how>."""

from __future__ import annotations

import json
import pathlib
import sys

import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
from torch.distributed.algorithms.join import Join

import torch_bridge

folder, how = sys.argv[1:3]
dist.init_process_group("xla")
rank = xm.get_ordinal()
x = torch.arange(4.0, device="xla")

part = x[rank * 2 : rank * 2 + 2] * max(rank, 1)  # one program in both processes: the place and the number are tables
own = torch.full((2,), float(rank)).to("xla")  # each process's own data, of which the other knows nothing
total = xm.all_reduce("sum", part)
torch.manual_seed(5 + rank)
drawn = torch.randn(2, device="xla")
found = {
    "rank": rank, "isinstance": isinstance(rank, int), "part": part.tolist(), "total": total.tolist(), "drawn": drawn.tolist(),
    "varying": [str(torch_bridge.varying(t)) for t in (part, own, total)], "host": torch.randn(2).tolist(),
}  # fmt: skip
here, parts, mine = int(rank), [torch.zeros(2, device="xla") for _ in range(2)], torch.zeros(2, device="xla")
dist.gather(own, parts if here == 1 else None, dst=1)
dist.scatter(mine, [x[:2], x[2:] * total] if here == 1 else None, src=1)
found |= {"gathered": [p.tolist() for p in parts], "scattered": mine.tolist()}
alone = [dist.new_group([k]) for k in range(2)]
if here == 1:  # groups of members alone: the other process does not come
    dist.barrier(group=alone[1])
    said = [None]
    dist.all_gather_object(said, "one", group=alone[1])
    found["said"] = said
if how == "uneven":  # the last batch of rank 1 is smaller, and so its program another one
    rows = [3, 3, 3] if here == 0 else [3, 3, 2]
    found["sums"] = [xm.all_reduce("sum", torch.full((n,), here + 1.0).to("xla").sum()).item() for n in rows]
    found["told"] = []
    for _ in range(3):  # where a process has a constant, XLA would make arithmetic of the collective
        weight = torch.zeros(2, device="xla") if here else torch.ones(2, device="xla") * 5
        dist.broadcast(weight, 0)
        found["told"].append(weight.tolist())
        twice = xm.all_reduce("sum", total)
        twice = xm.all_reduce("sum", twice * here if here else twice)
        found["told"].append(twice.tolist())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1).to("xla"))
    steps = []
    try:
        with Join([model]):
            for step in range(2 + here):
                model(torch.ones(2, 2, device="xla")).sum().backward()
                xm.mark_step()
                steps.append(step)
    except RuntimeError as error:
        found["joined"] = [steps, str(error)]
    rows = [x.reshape(2, 2), x.reshape(2, 2)[:1]][here] * 2.0 + here  # of 2 rows and of 1
    norm = torch.nn.SyncBatchNorm(2).to("xla")
    found["normed"] = [norm(rows).tolist(), norm.running_mean.tolist(), norm.running_var.tolist()]
    parts = [torch.zeros(2, device="xla") for _ in range(2)]
    dist.all_gather(parts, torch.full((2,), here + 1.0).to("xla"))
    dist.barrier()
    found["behind a barrier"] = [part.tolist() for part in parts] if here == 0 else None  # the other one reads nothing, and ends
pathlib.Path(folder, f"rank_{rank}.json").write_text(json.dumps(found))
if how == "exit" and int(rank) == 1:
    raise SystemExit(3)  # Python tells nobody of it; process 0 goes on to a collective
if how in ("mismatch", "exit"):
    y = xm.all_reduce("sum", x) if int(rank) == 0 else xm.all_gather(x)
    y.tolist()
