"""Scripts that import `neuronx_distributed` and no `torch_xla`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
{imports}
assert "jax" not in sys.modules, "importing is light"
import torch
torch.distributed.init_process_group("xla")
from neuronx_distributed.parallel_layers import parallel_state
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
print(torch.distributed.get_world_size(), parallel_state.get_data_parallel_size())
"""


@pytest.mark.parametrize("imports", ["import neuronx_distributed as nxd", "from nxd_jax.parallel_layers import parallel_state"])
def test_the_process_group_backend_is_there(imports: str) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    env = {**kept, "NEURON_RT_NUM_CORES": "4", "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}/aliases:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(imports=imports)], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["4", "2"]


def test_under_nxd_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(imports="import neuronx_distributed as nxd").replace('assert "jax" not in sys.modules', "assert True"))
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}/aliases:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "nxd_jax.run", "--nproc_per_node", "4", str(script)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and "4 2" in done.stdout, done.stderr
