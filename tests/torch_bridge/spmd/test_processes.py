"""Annotated programs in several processes: what one process gives, they give."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

SCRIPT = pathlib.Path(__file__).with_name("joined_script.py")
ROOT = pathlib.Path(__file__).parents[3]
OURS = ("WORLD_SIZE", "RANK", "NEURON_RT_NUM_CORES", "NXD_JAX_WORLD_SIZE")


def run(folder: pathlib.Path, processes: int) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    env = {k: v for k, v in os.environ.items() if k not in OURS} | {"OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    else:
        env["NEURON_RT_NUM_CORES"] = "2"
    return subprocess.run([*command, str(SCRIPT), str(folder)], env=env, capture_output=True, text=True, timeout=300)


def found(folder: pathlib.Path, process: int) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / f"process_{process}.json").read_text())
    return read


def test_two_processes_train_as_one(tmp_path: pathlib.Path) -> None:
    for name, processes in (("one", 1), ("two", 2)):
        done = run(tmp_path / name, processes)
        assert done.returncode == 0, done.stderr[-3000:]
    assert "one program over 2 virtual CPU devices of 2 processes, with sharding annotations" in done.stderr
    alone, *both = found(tmp_path / "one", 0), found(tmp_path / "two", 0), found(tmp_path / "two", 1)
    assert alone["counts"] == [2, 2, 1, 0, 1] and alone["devices"] == ["xla:0", "xla:1"]
    for k, here in enumerate(both):
        assert here["counts"] == [2, 1, 2, k, int(k == 0)] and here["devices"] == [f"xla:{k}"]
        assert here["shapes"] == alone["shapes"] == [[16, 8]] * 4 and here["shard"] == alone["shard"] == [16, 8]
        assert here["saved"] and here["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        assert torch.allclose(torch.tensor(here["weight"]), torch.tensor(alone["weight"]), rtol=1e-4, atol=1e-5)
    saved = [torch.load(tmp_path / name / "whole.pt") for name in ("one", "two")]
    for one, two in zip(saved[0].values(), saved[1].values(), strict=True):
        assert torch.allclose(one, two, rtol=1e-4, atol=1e-5)
