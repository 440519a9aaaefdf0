"""Checkpoints of pipelines in several processes: whoever saved them, they load anywhere, bit for bit, and training goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd_api
import pytest
import torch

from nxd_jax.checkpoint import reading
from tests.nxd_jax.checkpoint import job, pipeline_processes
from tests.nxd_jax.checkpoint.pipeline_job import values
from tests.nxd_jax.conftest import Nxd

ROOT = Path(__file__).parents[3]
NXD_RUN = Path(sys.executable).with_name("nxd-run")


def launch(processes: int, folder: Path, task: str, ranks: int = 1) -> list[dict[str, Any]]:
    """torchrun, with so many ranks in each process; what each process saw."""
    environment = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "NEURON_RT_NUM_CORES", "JAX_NUM_CPU_DEVICES")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += ["--no-python", str(NXD_RUN), "--nproc_per_node", str(ranks)] if ranks > 1 else []
    command += [pipeline_processes.__file__, str(folder), task]
    done = subprocess.run(
        command, env={**environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500
    )
    assert not done.returncode, done.stderr[-6000:]
    return [torch.load(folder / f"{task}.{k}.pt") for k in range(processes)]


def united(found: list[dict[str, Any]], way: str, what: str = "values") -> dict[str, torch.Tensor]:
    """Weights and state of all processes; those that several have must agree."""
    whole: dict[str, torch.Tensor] = {}
    for own in found:
        for name, value in own[way][what].items():
            assert torch.equal(whole.setdefault(name, value), value), name
    assert all(len(own[way][what]) < len(whole) for own in found)
    return whole


def files_of(folder: Path) -> dict[str, Any]:
    """What the files of ranks below a folder hold."""
    return {str(path.relative_to(folder)): torch.load(path, weights_only=False) for path in sorted(folder.rglob("*rank*.pt"))} | {
        str(path.relative_to(folder)): torch.load(path, weights_only=False) for path in sorted(folder.rglob("checkpoint.pt"))
    }


def check_files(folder: Path, other: Path, count: int) -> None:
    """Files of ranks must hold the same."""
    found, wanted = files_of(folder), files_of(other)
    assert found.keys() == wanted.keys() and len(found) == count
    for name, data in found.items():
        torch.testing.assert_close(data, wanted[name], rtol=0, atol=0, msg=name)


@pytest.mark.thorough
def test_from_processes_to_one_and_back(nxd: Nxd, tmp_path: Path) -> None:
    """Four processes save, one loads and saves, two with two ranks each go on. NxD's files are those that one process writes."""
    saved = launch(4, tmp_path, "save")
    losses = {}
    for way, (layout, how, background) in pipeline_processes.WAYS.items():
        folder = tmp_path / way
        layout.start(nxd)
        made = layout.build(**how)
        layout.train(made, 0, 2)
        losses[way] = layout.train(made, 2, 3)
        assert nxd_api.load_checkpoint(folder, "two", *made) == {"steps": 2}
        assert job.differing(values(made), united(saved, way)) == [] and made[2].last_epoch == 2
        nxd_api.save_checkpoint(folder, "again", *made, user_content={"steps": 2}, async_save=background)
        if way == "plain":
            nxd_api.save_checkpoint(folder, "nested", optimizer=made[1].state_dict())
        nxd_api.finalize_checkpoint()
        check_order(folder)
        nxd_api.load_checkpoint(folder / "original", "three", *made)
        assert job.differing(values(made), united(saved, way, "later")) == []
        pipeline_processes.save_for_nxd(tmp_path / "alone" / way, made)
        check_files(folder / "original", tmp_path / "alone" / way / "original", 4 + 4 if layout.tp == 2 else 2 + 4)
        check_files(folder / "ranks", tmp_path / "alone" / way / "ranks", 2 * layout.tp)
    resumed = launch(2, tmp_path, "resume", ranks=2)
    for way in pipeline_processes.WAYS:
        assert job.differing(united(resumed, way), united(saved, way)) == []
        later = united(saved, way, "later")
        assert job.differing(united(resumed, way, "later"), later) == []
        assert job.differing(united(resumed, way, "weights"), {k: v for k, v in later.items() if "/" not in k}) == []
        for own in (*saved, *resumed):
            assert own[way]["losses"] == pytest.approx(losses[way], rel=1e-5 if way == "plain" else 1e-2)
        assert all(own[way]["content"] == {"steps": 2} for own in resumed)
    for own in resumed:
        check_mistakes(own["mistakes"])


def check_order(folder: Path) -> None:
    """What several processes write is in the order in which one writes it."""
    for part in ("model", "optim"):
        found, wanted = (reading.Folder(folder / tag / part) for tag in ("two", "again"))
        assert found.entries == wanted.entries and found.aliases == wanted.aliases
        assert part == "optim" or list(found.entries) == list(wanted.entries)
    found, wanted = (reading.Folder(folder / tag / "optim").objects() for tag in ("two", "again"))
    assert found.keys() == wanted.keys()
    assert set(found.pop("master")) == set(wanted.pop("master"))
    assert found == wanted


def check_mistakes(said: dict[str, str]) -> None:
    """Names are compared for all processes together; what has no common names is refused."""
    text = said["names"]
    assert text.startswith("RuntimeError: cannot load"), text
    assert "missing in the checkpoint: layers.4.scale, layers.4.norm.weight (pipeline rank 1), " in text.replace("layers.5.scale, ", "")
    assert "unexpected in" not in text and "head.weight" not in text
    text = said["names of NxD"]
    assert text.startswith("RuntimeError: cannot load") and "layers.4.norm.weight (pipeline rank 1)" in text
    assert "unexpected in" not in text and "head.weight" not in text
    assert said["numbers"] == (
        "ValueError: the optimizer of a pipeline in several processes has this process's parameters alone, which go by name: pass model= as well"
    )
    assert said["a state dict"].startswith(
        "ValueError: the state dict of an optimizer whose pipeline is in several processes numbers this process's"
    )
    assert said["numbers of NxD"] == (
        "ValueError: each process has the optimizer of its own pipeline stages: pass model= as well, so that parameters go by name"
    )
    assert said["groups"].startswith(
        "ValueError: processes have optimizers of 2, 1 groups, and NxD's files number parameters group by group: give each"
    )
    assert "nested holds the state dict of a whole optimizer, and this process has some pipeline stages' alone" in said[
        "one state dict"
    ].replace("/optim", "")
