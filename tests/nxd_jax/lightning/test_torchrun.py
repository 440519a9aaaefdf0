"""Two real processes: the numbers of one process that hosts both ranks, decisions that all take, and an error that ends the job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nxd_jax.lightning import jobs, two_processes
from torch_bridge.mesh import world

ROOT = Path(__file__).parents[3]

pytestmark = [
    *jobs.MARKS,
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    folders = tmp_path / "two", tmp_path / "one"
    for folder in folders:
        folder.mkdir()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", two_processes.__file__, str(folders[0])]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'aliases'}"}
    done = subprocess.run(launch, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode != 0 and "RuntimeError: in one process" in done.stderr, done.stderr[-3000:]
    first, second = (json.loads((folders[0] / f"found_{rank}.json").read_text()) for rank in (0, 1))
    assert first.pop("epochs") == second.pop("epochs") == 2
    assert first["losses"][4:] == first["resumed"]
    rows, others = first.pop("predicted"), second.pop("predicted")
    assert first == second
    world.configure(world.World(2))
    alone = two_processes.train(folders[1])
    assert alone["kept"] == first["kept"] and alone["gathered"] == first["gathered"] == [[0.0, 10.0], 3.0]
    for name in ("losses", "resumed", "val_loss", "validated"):
        jobs.close(first[name], alone[name])
    jobs.close(rows, alone["predicted"])
    assert len(others) == 3 and others[-1] == rows[0]  # of 5 rows, the first fills the last place
