"""Two processes train, and save, as one process with two ranks does."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import torch
from torch_xla.distributed.fsdp import consolidate_sharded_model_checkpoints

SCRIPT = pathlib.Path(__file__).with_name("two_processes.py")
ROOT = pathlib.Path(__file__).parents[3]
OURS = ("WORLD_SIZE", "RANK", "NEURON_RT_NUM_CORES", "NXD_JAX_REPLAY")


def ran(folder: pathlib.Path, command: list[str], **env: str) -> list[dict[str, Any]]:
    folder.mkdir()
    env = {k: v for k, v in os.environ.items() if k not in OURS} | {"OMP_NUM_THREADS": "1", "NXD_JAX_STRICT_REPLICAS": "1"} | env
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-W", "ignore", *command, str(SCRIPT), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("found-*.json"))]


def test_two_processes_and_one_give_the_same(tmp_path: pathlib.Path) -> None:
    (one,) = ran(tmp_path / "one", [], NEURON_RT_NUM_CORES="2")
    two = ran(tmp_path / "two", ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"])
    assert one["played"] > 0 and all(found["played"] == one["played"] for found in two)
    torch.testing.assert_close(torch.tensor([f["losses"] for f in two]).squeeze(-1).T, torch.tensor(one["losses"]), rtol=1e-5, atol=1e-7)
    for found in two:
        torch.testing.assert_close(torch.tensor(found["norms"]), torch.tensor(one["norms"]), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(found["whole"], one["whole"], rtol=1e-5, atol=1e-7)
        assert found["labels"] == one["labels"] and all("dp" in label for label in one["labels"])
    joined = [
        consolidate_sharded_model_checkpoints(str(tmp_path / name / "final"), "_rank-*.pth", save_model=False)[0] for name in ("one", "two")
    ]
    assert list(joined[0]) == list(joined[1])
    for name, value in joined[0].items():
        torch.testing.assert_close(joined[1][name], value, rtol=1e-5, atol=1e-6)
    command = [
        sys.executable,
        "-m",
        "torch_xla.distributed.fsdp.consolidate_sharded_ckpts",
        "--ckpt_prefix",
        str(tmp_path / "two" / "final"),
    ]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "aliases")])}
    done = subprocess.run([*command, "--ckpt_suffix", "_rank-*-of-*.pth"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = torch.load(tmp_path / "two" / "final_consolidated.pth")["model"]
    assert all(torch.equal(written[name], value) for name, value in joined[1].items())
