"""What `test_experts_processes` runs in processes of its own: expert_processes.py FOLDER TASK."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import torch
import torch.distributed as dist
import torch_xla.distributed.xla_backend  # noqa: F401  # registers backend "xla"
from neuronx_distributed.parallel_layers import parallel_state

from nxd_jax.checkpoint import original
from tests.nxd_jax.checkpoint import pipeline_kills
from tests.nxd_jax.checkpoint.expert_job import Layout, build, train, values
from torch_bridge.mesh import world

WAYS = {
    "tensors": (Layout(4, tp=2, ep=2, zero1=True, router="group"), torch.bfloat16, True),
    "pipeline": (Layout(4, pp=2, ep=2, microbatches=2, rows=1, zero1=True), torch.float32, True),
}
"""By name: the layout of four ranks, the dtype, whether it is saved in the background."""

MACHINE = Layout(32, tp=4, pp=2, ep=2, microbatches=2, rows=1, zero1=True)
"""Of a trn1.32xlarge: expert-parallel ranks are data-parallel ones, too, so that the data-parallel size is 4."""


def lay_out(layout: Layout) -> None:
    """Lay the ranks out anew."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(layout.tp, layout.pp, expert_model_parallel_size=layout.ep)


def save(folder: Path) -> dict[str, Any]:
    """Train two steps, save in both formats, train one more."""
    found = {}
    for way, (layout, dtype, background) in WAYS.items():
        lay_out(layout)
        made = build(layout, dtype=dtype)
        train(layout, made, 0, 2)
        held = values(made)
        nxd.save_checkpoint(folder / way, "two", *made, user_content={"steps": 2}, async_save=background)
        original.export_original(folder / way / "original", "two", *made)
        found[way] = {"values": held, "losses": train(layout, made, 2, 3)}
        nxd.finalize_checkpoint()
    return found


def resume(folder: Path) -> dict[str, Any]:
    """Load what one process saved, in our format and in NxD's, and train a step."""
    found: dict[str, Any] = {}
    for way, (layout, dtype, _) in WAYS.items():
        lay_out(layout)
        made = build(layout, seed=2, dtype=dtype)
        nxd.load_checkpoint(folder / way / "original", "again", *made)
        theirs = values(made)
        made = build(layout, seed=1, dtype=dtype)
        content = nxd.load_checkpoint(folder / way, "again", *made)
        found[way] = {"content": content, "values": values(made), "theirs": theirs, "losses": train(layout, made, 2, 3)}
    return found


def killed(folder: Path) -> dict[str, Any]:
    """On all cores of a trn1.32xlarge: train four steps, save the second and be killed while the fourth is being saved. What was seen before is in whole.pt."""
    lay_out(MACHINE)
    made = build(MACHINE)
    losses = train(MACHINE, made, 0, 2)
    held = values(made)
    nxd.save_checkpoint(folder / "tags", "step_2", *made, user_content=2)
    losses += train(MACHINE, made, 2, 4)
    torch.save({"values": held, "losses": losses, "after": values(made)}, folder / "whole.pt")
    pipeline_kills.kill_at(folder / "tags", "20")
    nxd.save_checkpoint(folder / "tags", "step_4", *made, user_content=4)
    raise SystemExit("it was to be killed while it saved")


def resumed(folder: Path) -> dict[str, Any]:
    """Go on after that, by the number of expert-parallel ranks."""
    found: dict[Any, Any] = {}
    for ep in (2, 4):
        layout = replace(MACHINE, ep=ep)
        lay_out(layout)
        made = build(layout, seed=5)
        step = nxd.load_checkpoint(folder / "tags", None, *made)
        found[ep] = {"step": step, "values": values(made), "losses": train(layout, made, step, 4), "after": values(made)}
    return found


def main(folder: str, task: str) -> None:
    """Do this, and write what this process saw."""
    dist.init_process_group("xla")
    found = {"save": save, "resume": resume, "killed": killed, "resumed": resumed}[task](Path(folder))
    torch.save(found, Path(folder, f"{task}.{world.process_index()}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
