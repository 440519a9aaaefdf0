"""The smallest script, as plain python and under torchrun: its weights are those of the same batches in plain torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
RECORDED = str(Path(__file__).with_name("recorded.py"))
SCRIPT = str(ROOT / "examples" / "lightning_linear.py")
LAUNCHERS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]}


def replay(runs: list[dict[str, Any]]) -> tuple[torch.nn.Module, list[list[float]]]:
    """The job in plain torch on the ranks' batches; the model, and each rank's losses."""
    model = torch.nn.Linear(32, 2)
    model.load_state_dict(runs[0]["before"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses: list[list[float]] = []
    for step in range(20):
        optimizer.zero_grad()
        each = [(model(r["batches"][step]) - r["batches"][step][:, :2]).square().mean() for r in runs]
        torch.stack(each).mean().backward()
        optimizer.step()
        losses.append([loss.item() for loss in each])
    return model, losses


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_weights_and_losses_are_those_of_plain_torch(launcher: str, tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")])
    command = [*LAUNCHERS[launcher], RECORDED, SCRIPT, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "after 20 steps" in done.stdout
    runs = [torch.load(p) for p in sorted(tmp_path.glob("*.pt"))]
    assert len(runs) == (2 if launcher == "torchrun" else 1)
    model, losses = replay(runs)
    for rank, run in enumerate(runs):
        assert run["steps"] == 20
        assert run["logged"] == pytest.approx([step[rank] for step in losses], rel=1e-5)
        for name, p in model.named_parameters():
            torch.testing.assert_close(run["after"][name], p.detach(), rtol=1e-5, atol=1e-6)
            assert not torch.equal(run["after"][name], run["before"][name])
    assert len({tuple(run["batches"][0].flatten().tolist()) for run in runs}) == len(runs)
    assert (tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "epoch=0-step=20.ckpt" / "done").exists()
