"""Two real processes with a rank each."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

from tests.nxd_jax.inference import adapters, small, two_processes

ROOT = pathlib.Path(__file__).parents[3]


def test_two_processes(tmp_path: pathlib.Path) -> None:
    """Both answer as transformers does, one prompt with an adapter, whose weights they share."""
    theirs = small.folder(tmp_path, "qwen2")
    merged = adapters.merged(theirs, adapters.write(theirs, tmp_path / "adapter", 1))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", two_processes.__file__, str(tmp_path)]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'aliases'}"}
    done = subprocess.run(launch, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    models = [merged if name else theirs for name in two_processes.ADAPTERS]
    expected = [small.answers(m, [ids], 32, 6)[0] for m, ids in zip(models, two_processes.PROMPTS, strict=True)]
    for rank in range(2):
        assert json.loads((tmp_path / f"answers_{rank}.json").read_text()) == expected
