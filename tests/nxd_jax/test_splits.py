"""Four ranks in one process, in two with two ranks each, and in four: the same losses for every rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import ports, quick

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("splits_job.py")
RANKS = 4


def losses(folder: Path, kind: str, processes: int) -> torch.Tensor:
    """Of every rank, at every step."""
    folder.mkdir()
    path = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")])
    env = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "NEURON_RT_NUM_CORES", "JAX_NUM_CPU_DEVICES")}
    env |= quick.environment() | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", f"--master_port={ports.free()}", "-m"]
    each = ["nxd_jax.run", f"--nproc_per_node={RANKS // processes}", str(SCRIPT), str(folder), kind]
    command = [sys.executable, "-W", "ignore", *(torchrun if processes > 1 else ["-m"]), *each]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    files = sorted(folder.glob("found_*.json"))
    assert len(files) == processes
    found = {int(rank): values for file in files for rank, values in json.loads(file.read_text()).items()}
    return torch.tensor([found[rank] for rank in range(RANKS)])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["fsdp", "nxd"])
def test_any_split_gives_the_same(tmp_path: Path, kind: str) -> None:
    one = losses(tmp_path / "1", kind, 1)
    assert one.shape == (RANKS, 10) and one[:, -1].max() < one[:, 0].min()
    for processes in (2, 4):
        torch.testing.assert_close(losses(tmp_path / str(processes), kind, processes), one, rtol=1e-5, atol=1e-7)
