"""Two real processes: full weights and checkpoints there, and between there and a process that hosts both ranks."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import torch

from nxd_jax import parallel_layers
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.utils import two_processes
from torch_bridge.mesh import rank_numbers

ROOT = pathlib.Path(__file__).parents[3]


def test_two_processes(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", two_processes.__file__, str(tmp_path)]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'aliases'}"}
    done = subprocess.run(launch, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    nxd(2, tp=2)
    theirs = two_processes.make(0).to("xla")
    two_processes.rewrite(theirs)
    for name, xser in ("cpu", False), ("xla", False), ("xla_xser", True):
        model = two_processes.make(1).to("xla")
        rest = parallel_layers.load(tmp_path / name, model, load_xser=xser)
        assert rest["rank"] == 0 and rank_numbers.is_ranked(rest["rank"])  # each rank's own
        two_processes.check_equal(model, theirs)
    model = two_processes.make(1).to("xla")
    parallel_layers.load(tmp_path / "full.pt", model, sharded=False)
    two_processes.check_equal(model, theirs)
    assert torch.load(tmp_path / "cpu" / "tp_rank_01_pp_rank_00" / "checkpoint.pt", weights_only=True)["rank"] == 1
    alone = two_processes.zero1()
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"zero1_{rank}.pt"), alone, rtol=1e-6, atol=1e-7)
