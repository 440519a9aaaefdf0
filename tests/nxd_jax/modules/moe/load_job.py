"""What `test_load` runs in one process and in several: a pipeline whose experts are counted and kept balanced, each process its own stages'.

python load_job.py <folder>, started by torchrun or nxd-run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_xla

from nxd_jax.modules.moe import load
from nxd_jax.modules.moe.load_reader import layers
from nxd_jax.parallel_layers import parallel_state
from tests.nxd_jax.modules.moe.training import Layout
from torch_bridge.mesh import world
from torch_bridge.recorder import sharded

LAYOUT = Layout(4, pp=2, ep=2, router="group", microbatches=2, rows=1, factor=1.0)


def train() -> dict[str, dict[str, Any]]:
    """By the layers that this process has."""
    model, optimizer = LAYOUT.make()
    log = load.LoadLog(model)
    load.ExpertBalancer(model, 0.01).attach(optimizer)
    for batch in LAYOUT.batches():
        model.run_train(**LAYOUT.local(batch))
        optimizer.step()
        optimizer.zero_grad()
        numbers = log.step()
        torch_xla.sync()
    return {
        name: {
            "counts": statistics,
            "last": log.steps[-1].layers[name],
            "imbalance": float(numbers[f"moe/imbalance/{name}"]),
            "bias": sharded.shards(layers(model)[name].router.e_score_correction_bias)[0],
        }
        for name, statistics in load.measure(model, reset=True).items()
    }


def main(folder: Path) -> None:
    dist.init_process_group("xla")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=LAYOUT.pp, expert_model_parallel_size=LAYOUT.ep)
    torch.save(train(), folder / f"{world.current().hosted[0]}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
