"""Models with experts in several processes, and on a whole machine that is killed: what was saved loads elsewhere, bit for bit, and training goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd_api
import pytest
import torch

from nxd_jax.checkpoint import original, tags
from tests import quick
from tests.nxd_jax.checkpoint.expert_job import build, differing, start, train, values
from tests.nxd_jax.checkpoint.expert_processes import WAYS
from tests.nxd_jax.conftest import Nxd

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("expert_processes.py")
NXD_RUN = Path(sys.executable).with_name("nxd-run")


def run(*command: Any) -> subprocess.CompletedProcess[str]:
    keep = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "NEURON_RT_NUM_CORES", "JAX_NUM_CPU_DEVICES")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**keep, **quick.environment(), "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=500)


def launch(processes: int, folder: Path, task: str, ranks: int = 1) -> list[dict[str, Any]]:
    """torchrun, with so many ranks in each process; what each process saw."""
    inside = ["--no-python", NXD_RUN, "--nproc_per_node", ranks] if ranks > 1 else []
    done = run("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *inside, SCRIPT, folder, task)
    assert not done.returncode, done.stderr[-6000:]
    return [torch.load(folder / f"{task}.{k}.pt") for k in range(processes)]


def united(found: list[dict[str, Any]], way: str, what: str = "values") -> dict[str, torch.Tensor]:
    """Weights and state of all processes; those that several have must agree."""
    whole: dict[str, torch.Tensor] = {}
    for own in found:
        for name, value in own[way][what].items():
            assert torch.equal(whole.setdefault(name, value), value), name
    return whole


@pytest.mark.thorough
def test_from_processes_to_one_and_back(nxd: Nxd, tmp_path: Path) -> None:
    """Four processes save, one loads and saves, two with two ranks each go on. NxD's files are those that one process writes."""
    saved = launch(4, tmp_path, "save")
    losses = {}
    for way, (layout, dtype, _) in WAYS.items():
        start(nxd, layout)
        made = build(layout, dtype=dtype)
        train(layout, made, 0, 2)
        losses[way] = train(layout, made, 2, 3)
        nxd_api.load_checkpoint(tmp_path / way / "original", "two", *made)
        assert differing(values(made), united(saved, way)) == []
        made = build(layout, seed=1, dtype=dtype)
        assert nxd_api.load_checkpoint(tmp_path / way, "two", *made) == {"steps": 2}
        assert differing(values(made), united(saved, way)) == [] and made[2].last_epoch == 2
        nxd_api.save_checkpoint(tmp_path / way, "again", *made, user_content={"steps": 2})
        original.export_original(tmp_path / way / "original", "again", *made)
        check_files(tmp_path / way / "original")
    resumed = launch(2, tmp_path, "resume", ranks=2)
    for way, (_, dtype, _) in WAYS.items():
        for what in ("values", "theirs"):
            assert differing(united(resumed, way, what), united(saved, way)) == []
        for found in (saved, resumed):  # each process has the mean of its own ranks' losses
            mean = sum(own[way]["losses"][0] for own in found) / len(found)
            assert [mean] == pytest.approx(losses[way], rel=1e-5 if dtype == torch.float32 else 1e-2)
        assert all(own[way]["content"] == {"steps": 2} for own in resumed)


def check_files(folder: Path) -> None:
    """What several processes wrote is what one writes."""
    paths = [sorted(p.relative_to(folder / tag) for p in (folder / tag).rglob("*rank*.pt")) for tag in ("two", "again")]
    assert paths[0] == paths[1] and len(paths[0]) >= 8
    for path in paths[0]:
        a, b = (torch.load(folder / tag / path, weights_only=False) for tag in ("two", "again"))
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=str(path))


@pytest.mark.slow
def test_a_machine_that_is_killed(tmp_path: Path) -> None:
    """TP 4 x EP 2 x PP 2 on 32 ranks, killed while it saves the fourth step. The second's weights and optimizer are there bit for bit with EP 4, too; with EP 2
    training goes on bit for bit. (With EP 4 gradients of experts are added up in another order.)"""

    def on_machine(task: str) -> int:
        done = run("-m", "nxd_jax.run", "--instance", "trn1.32xlarge", SCRIPT, tmp_path, task)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr[-6000:]
        return done.returncode

    assert on_machine("killed") == -signal.SIGKILL
    assert tags.completed(tmp_path / "tags") == ["step_2"] and tags.unfinished(tmp_path / "tags")
    whole = torch.load(tmp_path / "whole.pt")
    assert on_machine("resumed") == 0
    same, other = (torch.load(tmp_path / "resumed.0.pt")[ep] for ep in (2, 4))
    for found in (same, other):
        assert found["step"] == 2 and differing(found["values"], whole["values"]) == []
    assert same["losses"] == whole["losses"][2:] and differing(same["after"], whole["after"]) == []
    assert other["losses"] == pytest.approx(whole["losses"][2:], rel=1e-6)
