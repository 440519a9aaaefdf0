"""What `test_torchrun` runs in several processes (python -m torch.distributed.run ... torchrun_job.py <folder> <layout number> ...), and itself in one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_xla.distributed.xla_backend  # noqa: F401

from nxd_jax.parallel_layers import parallel_state
from tests.nxd_jax.modules.moe.training import Layout, steps
from torch_bridge.mesh import world
from torch_bridge.recorder import sharded

LAYOUTS = [
    Layout(4, tp=2, ep=2, factor=1.0, sequence_parallel=True, router_sp=True, zero1=True),
    Layout(4, ep=4, shared=True, router="group"),
    Layout(4, ep=2, shuffle=2, aux=0.0, zero1=True),
    Layout(4, pp=2, ep=2, microbatches=2, rows=1),
    Layout(4, tp=2, ep=2, checkpoint=True),
]


def trained(layout: Layout) -> dict[str, Any]:
    """Losses and norms, and what each rank of this process holds of the weights in the end."""
    model, optimizer = layout.make()
    numbers = steps(layout, model, optimizer)
    weights = {name: [t.clone() for t in sharded.shards(p.detach())] for name, p in model.named_parameters()}
    return {"numbers": torch.tensor(numbers), "weights": weights}


def main() -> None:
    folder, numbers = Path(sys.argv[1]), [int(n) for n in sys.argv[2:]]
    dist.init_process_group("xla")
    for number in numbers:
        layout = LAYOUTS[number]
        parallel_state.initialize_model_parallel(layout.tp, pipeline_model_parallel_size=layout.pp, expert_model_parallel_size=layout.ep)
        found = trained(layout)
        torch.save(found, folder / f"{number}.{world.first()}.pt")
        parallel_state.destroy_token_shuffle_group()
        parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main()
