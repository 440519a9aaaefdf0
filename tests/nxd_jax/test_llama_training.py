"""examples/llama/train.py as users start it: emulated machines, one process per rank, and a plain script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples" / "llama" / "train.py")
TINY = ["--batch", "2", "--seq", "32", "--hidden", "64", "--layers", "1"]
EMULATE = [sys.executable, "-m", "nxd_jax.run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--master_port", "0", "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]


def environment(**more: str) -> dict[str, str]:
    """That of a process which finds the checkout, and has as many devices as it asks for."""
    env = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"} | more
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")])
    return env


def start(launcher: list[str], *arguments: str, out: Path, **variables: str) -> tuple[dict[str, Any], str]:
    """Run the script; its summary and everything it printed."""
    command = [*launcher, SCRIPT, *TINY, *arguments, "--out", str(out)]
    done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((out / "summary.json").read_text()), done.stdout + done.stderr


@pytest.mark.thorough
@pytest.mark.slow
def test_torchrun_and_one_process_agree(tmp_path: Path) -> None:
    """tp 2, ten steps: the same losses to float32 rounding and the same checkpoint. (`test_run.py` has tp 2 x dp 2 in four processes.)"""
    arguments = ["--tp", "2", "--sequence-parallel", "--steps", "10"]
    hosted, _ = start([*EMULATE, "--nproc_per_node", "2"], *arguments, "--checkpoint", str(tmp_path / "a"), out=tmp_path / "hosted")
    real, _ = start([*TORCHRUN, "--nproc_per_node=2"], *arguments, "--checkpoint", str(tmp_path / "b"), out=tmp_path / "real")
    assert (hosted["tp"], hosted["dp"]) == (real["tp"], real["dp"]) == (2, 1)
    assert len(hosted["losses"]) == 10 and hosted["losses"][-1] < hosted["losses"][0] - 0.5
    torch.testing.assert_close(torch.tensor(hosted["losses"]), torch.tensor(real["losses"]), rtol=2e-6, atol=2e-6)
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.pt"))
    assert [str(f) for f in files] == [f"tp_rank_0{k}_pp_rank_00/checkpoint.pt" for k in range(2)]
    for file in files:
        one, two = (torch.load(tmp_path / folder / file)["model"] for folder in "ab")
        assert one.keys() == two.keys()
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("instance", "arguments", "sizes"),
    [
        ("trn1.32xlarge", ["--tp", "8"], (8, 4, 1)),
        ("trn2.48xlarge", ["--tp", "16", "--cp", "2", "--heads", "16", "--kv-heads", "8", "--kv-copies", "2"], (16, 2, 2)),
    ],
)
def test_a_whole_machine(instance: str, arguments: list[str], sizes: tuple[int, int, int], tmp_path: Path) -> None:
    summary, output = start([*EMULATE, "--instance", instance], *arguments, "--steps", "8", out=tmp_path)
    world = sizes[0] * sizes[1] * sizes[2]
    assert f"nxd-run: 1 x {instance}, {world} ranks ({world} per machine) in one process" in output
    assert f"nxd_jax: {world} ranks in 1 process(es), on {world} virtual CPU devices" in output
    assert (summary["tp"], summary["dp"], summary["cp"]) == sizes and summary["world"] == world
    assert summary["losses"][-1] < summary["losses"][0] - 0.3
    assert "UserWarning" not in output


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "arguments",
    [["--schedule", "zbv", "--tp", "2"], ["--microbatches", "2", "--sequence-parallel", "--tp", "2"], ["--cp", "2", "--tp", "1"]],
)
def test_a_pipeline(arguments: list[str], tmp_path: Path) -> None:
    """The losses and the Hugging Face folder of a model that is not cut."""
    common = ["--layers", "4", "--batch", "4", "--steps", "4", *arguments]
    cut, _ = start([*EMULATE, "--nproc_per_node", "4"], *common, "--pp", "2", "--save-hf", str(tmp_path / "a"), out=tmp_path / "cut")
    whole, _ = start([*EMULATE, "--nproc_per_node", "2"], *common, "--save-hf", str(tmp_path / "b"), out=tmp_path / "whole")
    assert (cut["pp"], whole["pp"], len(cut["losses"])) == (2, 1, 4)
    torch.testing.assert_close(torch.tensor(cut["losses"]), torch.tensor(whole["losses"]), rtol=1e-4, atol=1e-5)
    one, two = (load_file(tmp_path / folder / "model.safetensors") for folder in "ab")
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_a_plain_script_makes_the_smallest_world(tmp_path: Path) -> None:
    summary, output = start([sys.executable], "--tp", "2", "--steps", "2", out=tmp_path)
    assert (summary["tp"], summary["dp"]) == (2, 1) and "nxd_jax: 2 ranks" in output
