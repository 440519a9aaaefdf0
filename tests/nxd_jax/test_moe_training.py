"""examples/moe/train.py as users start it: emulated machines, one process per rank, and a plain script."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.nxd_jax import test_llama_training
from tests.nxd_jax.test_llama_training import EMULATE, ROOT, TORCHRUN

SCRIPT = ROOT / "examples" / "moe" / "train.py"
TINY = ["--batch", "2", "--seq", "32", "--hidden", "64"]


def start(launcher: list[str], *arguments: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], str]:
    """Run the script; its summary and everything it printed."""
    monkeypatch.setattr(test_llama_training, "SCRIPT", str(SCRIPT))
    monkeypatch.setattr(test_llama_training, "TINY", TINY)
    return test_llama_training.start(launcher, *arguments, out=out)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("mixtral", ["--capacity-factor", "1.5", "--sequence-parallel"]),
        ("deepseek", ["--zero1", "--dropless"]),
        ("mixtral", ["--balance", "bias", "--bf16", "--zero1", "--sequence_parallel"]),
    ],
)
def test_it_learns(model: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, hf = tmp_path / "out", tmp_path / "hf"
    layout = ["--model", model, "--tp", "2", "--ep", "2", "--steps", "20", "--save-hf", str(hf)]
    summary, output = start([*EMULATE, "--nproc_per_node", "4"], *layout, *arguments, out=out, monkeypatch=monkeypatch)
    assert f"{model} on 4 ranks: tp 2 x pp 1 x dp 2, 4 of the 8 experts of a layer on each (ep 2)" in output
    assert (summary["ep"], summary["dp"], len(summary["losses"])) == (2, 2, 20)
    assert sum(summary["losses"][-3:]) / 3 < summary["losses"][0] - 1.0
    assert all(1 <= n <= 4 for n in summary["imbalance"])
    drops = "--capacity-factor" in arguments
    assert all((0 < share < 0.75) if drops else share == 0 for share in summary["dropped"])
    assert "% dropped" in output and "UserWarning" not in output
    assert transformers.AutoModelForCausalLM.from_pretrained(hf).config.num_local_experts == 8


def killed(command: list[str], checkpoint: Path) -> str:
    """Run the script until its checkpoint after step 2 is complete, then SIGKILL it; what it printed."""
    with subprocess.Popen(
        command, env=test_llama_training.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        until = time.time() + 400
        while not (checkpoint / "step_000002" / "done").exists() and process.poll() is None and time.time() < until:
            time.sleep(0.01)
        process.kill()
        output = process.stdout.read() if process.stdout is not None else ""
    assert process.returncode == -signal.SIGKILL, output[-3000:]
    return output


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.thorough
def test_a_whole_machine_that_is_killed_and_experts_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TP 4 x EP 2 x PP 2 x DP 4 on a trn1.32xlarge, killed after two of four steps. Resumed as it was, it has the losses of the run that nobody killed, bit for
    bit; with EP 4, where sums have another order, the same to float32 rounding."""
    machine = [*EMULATE, "--instance", "trn1.32xlarge"]
    common = ["--tp", "4", "--pp", "2", "--zero1", "--save-every", "2"]
    steps, a = ["--steps", "4"], tmp_path / "a"
    whole, output = start(machine, *common, *steps, "--ep", "2", out=tmp_path / "whole", monkeypatch=monkeypatch)
    assert "mixtral on 32 ranks: tp 4 x pp 2 x dp 4, 4 of the 8 experts of a layer on each (ep 2)" in output
    killed([*machine, str(SCRIPT), *TINY, *common, *steps, "--ep", "2", "--checkpoint", str(a)], a)
    shutil.copytree(a, tmp_path / "b")
    found = {}
    for ep, folder in (("2", a), ("4", tmp_path / "b")):
        resumed, output = start(
            machine, *common, *steps, "--ep", ep, "--checkpoint", str(folder), "--resume", out=tmp_path / ep, monkeypatch=monkeypatch
        )
        assert "goes on after step 2" in output and (resumed["ep"], resumed["first"]) == (int(ep), 2)
        found[ep] = resumed
    assert found["2"]["losses"] == whole["losses"][2:]
    torch.testing.assert_close(torch.tensor(found["4"]["losses"]), torch.tensor(whole["losses"][2:]), rtol=2e-6, atol=2e-6)
    assert found["4"]["imbalance"] == found["2"]["imbalance"] == whole["imbalance"][2:]


@pytest.mark.thorough
@pytest.mark.slow
def test_torchrun_and_one_process_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--model", "deepseek", "--tp", "2", "--ep", "2", "--zero1", "--steps", "5"]
    hosted, _ = start([*EMULATE, "--nproc_per_node", "4"], *arguments, out=tmp_path / "hosted", monkeypatch=monkeypatch)
    real, _ = start([*TORCHRUN, "--nproc_per_node=4"], *arguments, out=tmp_path / "real", monkeypatch=monkeypatch)
    assert (hosted["ep"], hosted["dp"]) == (real["ep"], real["dp"]) == (2, 2)
    torch.testing.assert_close(torch.tensor(hosted["losses"]), torch.tensor(real["losses"]), rtol=2e-6, atol=2e-6)
    assert hosted["imbalance"] == real["imbalance"]


def test_a_resume_from_nowhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("moe_train", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["train.py", "--resume"])
    with pytest.raises(SystemExit):
        module.parse_args()
    assert "--resume needs --checkpoint, the folder to go on from" in capsys.readouterr().err
