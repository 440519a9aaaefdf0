"""transformers' Trainer with FSDP for XLA on two ranks: the losses and norms of gradients of plain data parallelism, and a checkpoint of the whole model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("optimizer", "norm"), [("sgd", 0.01), ("adamw_torch", 1.0)])
def test_trains_as_plain_data_parallelism(optimizer: str, norm: float, tmp_path: Path) -> None:
    """SGD with gradients that are all clipped: ranks that clip by different factors, or sums of different parts, give other losses."""
    variables = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'aliases'}",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_PLATFORMS": "cpu",
        "NEURON_RT_NUM_CORES": "2",
    }
    command = [sys.executable, str(ROOT / "tests" / "models" / "hf_fsdp.py"), str(tmp_path / "out"), optimizer, str(norm)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=400, cwd=tmp_path)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert done.returncode == 0 and lines, done.stderr[-3000:]
    found = json.loads(lines[-1].removeprefix("FOUND "))
    plain, shared = found["plain"], found["fsdp"]
    assert shared["wrapped"] and not plain["wrapped"] and len(plain["losses"]) == 3
    assert shared["losses"] == pytest.approx(plain["losses"], rel=1e-5) and shared["norms"] == pytest.approx(plain["norms"], rel=1e-5)
    assert abs(plain["losses"][0] - plain["losses"][-1]) > 1e-2
    whole = [LlamaForCausalLM.from_pretrained(tmp_path / "out" / kind / "checkpoint-3").state_dict() for kind in ("plain", "fsdp")]
    assert list(whole[0]) == list(whole[1])
    for name, value in whole[0].items():
        torch.testing.assert_close(whole[1][name], value, rtol=1e-4, atol=1e-5)
