"""What `test_torchrun` runs in several processes (python -m torch.distributed.run ... torchrun_job.py <folder> <what> ...), and itself in one."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.pipeline import NxDPPModel
from torch import nn

from tests.nxd_jax.pipeline.models import Layout
from torch_bridge.mesh import world
from torch_bridge.recorder import sharded

FOUR = [
    Layout(4, 2, 4, tp=2),
    Layout(4, 2, 4, tied=True, zero1=True),
    Layout(4, 4, 3, tied=True, skip=True),
    Layout(4, 2, 4, "zbv", stages=2, tp=2, zero1=True, sequence_parallel=True),
    Layout(4, 4, 4, "interleaved", stages=2, checkpoint=True),
    Layout(4, 2, 4, "zb_h1", cp=2),
]
"""Layouts of four ranks."""
EIGHT = [
    Layout(8, 2, 4, tp=2, zero1=True, tied=True),
    Layout(8, 4, 8, "dualpipev", stages=2, tp=2, skip=True),
    Layout(8, 4, 4, "looped_bfs", stages=2, tp=1, zero1=True),
]
"""Layouts of eight ranks."""


def lay_out(layout: Layout) -> None:
    """Lay the ranks out anew."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp, context_parallel_size=layout.cp
    )


def trained(layout: Layout, steps: int = 3) -> dict[str, Any]:
    """What a process sees of some training steps. Weights: by name, the blocks of its ranks."""
    model, optimizer = layout.make()
    given = of_this_rank(layout)
    losses, norms = [], []
    for _ in range(steps):
        loss = model.run_train(**given)
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        losses.append(float(loss))
        norms.append(float(optimizer.grad_norm))
    evaluated = float(model.run_eval(**given))
    weights = {name: sharded.shards(p.detach()) for name, p in model.named_parameters()}
    return {"numbers": [*losses, *norms, evaluated], "weights": weights, "stages": len(model.local_modules())}


def of_this_rank(layout: Layout) -> dict[str, torch.Tensor]:
    """The batch of each data-parallel rank of this process."""
    if len(world.current().hosted) > 1:
        return layout.local(layout.batch())
    return {name: t.chunk(layout.dp)[int(parallel_state.get_data_parallel_rank())] for name, t in layout.batch().items()}


class Noisy(nn.Module):
    """A layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(x))


class Noise(nn.Module):
    """Layers with dropout, and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Noisy() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def noisy(schedule: str, **options: Any) -> dict[str, Any]:
    """What a script of plain `NxDPPModel` sees: losses of two steps (None on other ranks than the last), names, and gradients' names; two pipeline ranks."""
    torch.manual_seed(3)
    model = NxDPPModel(
        Noise(),
        transformer_layer_cls=Noisy,
        num_microbatches=4,
        output_loss_value_spec=True,
        input_names=["x"],
        auto_partition=True,
        schedule=schedule,
        virtual_pipeline_size=2 if schedule == "zbv" else 1,
        **options,
    )
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    losses = [model.run_train(x=x) for _ in range(2)]
    said = [[float(t) for t in loss] if isinstance(loss, list) else None if loss is None else float(loss) for loss in losses]
    return {
        "losses": said,
        "evaluated": said if (found := model.run_eval(x=x)) is None else type(found).__name__,
        "names": [name for name, _ in model.local_named_parameters()],
        "state": list(model.local_state_dict()),
        "gradients": [name for name, p in model.local_named_parameters() if p.grad is not None],
        "loaded": str(model.load_state_dict(Noise().state_dict())),
    }


def reduced() -> list[float]:
    """Collectives of a script along the pipeline's ranks, with what lies with a stage: each process's own value."""
    model = NxDPPModel(Noise(), Noisy, input_names=["x"], auto_partition=True, output_loss_value_spec=True)
    weight = next(p for _, p in model.local_named_parameters()).detach()
    group = parallel_state.get_pipeline_model_parallel_group()
    mine = torch.full_like(weight, float(int(parallel_state.get_pipeline_model_parallel_rank()) + 1)) + weight * 0
    total = xm.all_reduce("sum", mine, groups=group)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=group)
    return [float(total[0, 0]), float(mine[0, 0])]


def thawing() -> list[list[str]]:
    """What has gradients after each of three steps: a weight that both stages read is frozen at first and at last, in the process that has it."""
    torch.manual_seed(3)
    whole = Noise()
    whole.layers[3].linear.weight = tied = whole.layers[0].linear.weight
    tied.requires_grad_(False)
    model = NxDPPModel(whole, Noisy, 4, output_loss_value_spec=True, input_names=["x"], auto_partition=True)
    found = []
    for learns in (False, True, False):
        for name, p in model.local_named_parameters():
            p.grad = None
            p.requires_grad_(learns or "0.linear.weight" not in name)
        model.run_train(x=torch.ones(8, 8))
        found.append([f"{name} {p.grad.abs().sum():.4g}" for name, p in model.local_named_parameters() if p.grad is not None])
    return found


def dying() -> None:
    """Train until the last pipeline rank's process is killed in the middle of its second step."""
    layout = Layout(2, 2, 4)
    lay_out(layout)
    model, optimizer = layout.make()
    for step in range(1000):
        if step and world.process_index() == 1:
            model.local_modules()[0].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            sys.stderr.write(f"{time.time()} dies\n")
        float(model.run_train(**of_this_rank(layout)))
        optimizer.step()


def main(folder: str, what: str, *numbers: str) -> None:
    """Do this, and write what this process saw."""
    dist.init_process_group("xla")
    place = world.process_index()
    if what == "dying":
        dying()
    for number in map(int, numbers):
        layout = {"four": FOUR, "eight": EIGHT}[what][number]
        lay_out(layout)
        torch.save(trained(layout), Path(folder, f"{number}.{place}.pt"))
    if what == "two":
        lay_out(Layout(2, 2, 4))
        found = {schedule: noisy(schedule) for schedule in ("1f1b", "zbv")} | {
            "each": noisy("1f1b", return_mb_loss=True),
            "reduced": reduced(),
            "thawing": thawing(),
        }
        Path(folder, f"two.{place}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
