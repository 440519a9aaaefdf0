"""Adapters in two real processes, and between there and a process that hosts both ranks."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from nxd_jax.modules.lora import peft_format
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.lora import two_processes
from tests.nxd_jax.lora.models import full

ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.thorough
@pytest.mark.slow
def test_two_processes(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", two_processes.__file__, str(tmp_path)]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'aliases'}"}
    done = subprocess.run(launch, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    losses, counts = json.loads((tmp_path / "losses.json").read_text())
    nxd(2, tp=2)
    model = two_processes.made()
    torch.testing.assert_close(two_processes.train(model), losses, rtol=1e-5, atol=1e-6)
    assert list(model.get_nb_trainable_parameters()) == counts
    trained = {name: full(t) for name, t in model.tensors().items() if t.requires_grad}
    fused = {"qkv_proj": ("q", "k", "v")}
    for load in (lambda m: m.load_lora(str(tmp_path / "ours"), "t"), lambda m: peft_format.load_pretrained(m, tmp_path / "peft", fused)):
        other = two_processes.made()
        load(other)
        for name, value in trained.items():
            torch.testing.assert_close(full(other.tensors()[name]), value, rtol=1e-4, atol=1e-6)
