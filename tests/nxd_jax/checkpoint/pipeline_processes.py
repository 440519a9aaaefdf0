"""What `test_pipeline_torchrun` runs in several processes: python -m torch.distributed.run ... pipeline_processes.py FOLDER TASK."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import torch
import torch.distributed as dist
import torch_xla.distributed.xla_backend  # noqa: F401  # registers backend "xla"
from neuronx_distributed import parallel_layers
from neuronx_distributed.parallel_layers import parallel_state

from nxd_jax.checkpoint import original
from tests.nxd_jax.checkpoint import job
from tests.nxd_jax.checkpoint.pipeline_job import Layout, values
from torch_bridge.mesh import world

WAYS: dict[str, tuple[Layout, dict[str, Any], bool]] = {
    "plain": (Layout(4, 2, 2), {"tied": True}, False),
    "zero1-bfloat16-background": (Layout(4, 2, zero1=True), {"dtype": torch.bfloat16, "tied": True}, True),
}
"""By name: the layout of four ranks, how the model is built, whether it is saved in the background."""


def lay_out(layout: Layout) -> None:
    """Lay the ranks out anew."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp)


def save(folder: Path) -> dict[str, Any]:
    """Train two steps, save in every way, train two more."""
    found = {}
    for way, (layout, how, background) in WAYS.items():
        lay_out(layout)
        made = layout.build(**how)
        layout.train(made, 0, 2)
        held = values(made)
        nxd.save_checkpoint(folder / way, "two", *made, user_content={"steps": 2}, async_save=background)
        found[way] = {"values": held, "losses": layout.train(made, 2, 3)}
        save_for_nxd(folder / way, made)
        found[way]["later"] = values(made)
        nxd.finalize_checkpoint()
    return found


def save_for_nxd(folder: Path, made: Any) -> None:
    """NxD's files, as both of its functions write them."""
    original.export_original(folder / "original", "three", *made)
    parallel_layers.save({"model": made[0].local_state_dict(), "steps": 3}, folder / "ranks")


def resume(folder: Path) -> dict[str, Any]:
    """Load what one process saved, train; load what NxD could have saved."""
    found: dict[str, Any] = {}
    for way, (layout, how, _) in WAYS.items():
        lay_out(layout)
        made = layout.build(seed=1, **how)
        content = nxd.load_checkpoint(folder / way, "again", *made)
        found[way] = {"content": content, "values": values(made), "losses": layout.train(made, 2, 3)}
        made = layout.build(seed=2, **how)
        parallel_layers.load(folder / way / "ranks", made[0])
        found[way]["weights"] = job.weights(made[0])
        made = layout.build(seed=3, **how)
        nxd.load_checkpoint(folder / way / "original", None, *made)
        found[way]["later"] = values(made)
    return found | {"mistakes": mistakes(folder / "plain")}


def mistakes(folder: Path) -> dict[str, str]:
    """What is said of what cannot be done."""
    layout = WAYS["plain"][0]
    lay_out(layout)
    model, optimizer, _ = layout.build(layers=6, more=True)
    _, uneven = layout.build()[:2]
    if world.process_index():
        uneven.param_groups.pop()
    said = {}
    for name, call in {
        "names": lambda: nxd.load_checkpoint(folder, "two", model),
        "names of NxD": lambda: nxd.load_checkpoint(folder / "original", None, model),
        "numbers": lambda: nxd.save_checkpoint(folder, "no", optimizer=optimizer),
        "a state dict": lambda: nxd.save_checkpoint(folder, "no", model, optimizer.state_dict()),
        "numbers of NxD": lambda: nxd.load_checkpoint(folder / "original", None, optimizer=optimizer),
        "groups": lambda: nxd.load_checkpoint(folder / "original", None, optimizer=uneven),
        "one state dict": lambda: nxd.load_checkpoint(folder, "nested", optimizer=optimizer),
    }.items():
        try:
            call()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def main(folder: str, task: str) -> None:
    """Do this, and write what this process saw."""
    dist.init_process_group("xla")
    found = {"save": save, "resume": resume}[task](Path(folder))
    torch.save(found, Path(folder, f"{task}.{world.process_index()}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
