"""`nxd-inspect` as a user and as CI would call it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from nxd_jax import inspect_run
from tests.nxd_jax.inspect.test_watching import check

ROOT = pathlib.Path(__file__).parents[3]

SCRIPT = """
    import sys

    import torch
    import torch_xla.core.xla_model as xm
    from neuronx_distributed.parallel_layers import ColumnParallelLinear, RowParallelLinear, parallel_state

    torch.distributed.init_process_group("xla")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)


    class Model(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.up = ColumnParallelLinear(8, width, bias=False, gather_output=False)
            self.down = RowParallelLinear(width, 8, bias=False, input_is_parallel=True)

        def forward(self, x):
            return self.down(torch.relu(self.up(x)))


    def main():
        model = Model(int(sys.argv[1])).to("xla")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in (4, 4, 6, 4, 6, 4):
            loss = model(torch.zeros(batch, 8).to("xla")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            xm.mark_step()
            print("loss", loss.item(), flush=True)
        if "fail" in sys.argv:
            raise RuntimeError("the script is broken")


    if __name__ == "__main__":
        main()
"""


def run(folder: pathlib.Path, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NXD_JAX", "NEURON", "WORLD", "RANK"))} | variables
    command = [sys.executable, "-W", "ignore", "-m", "nxd_jax.inspect_run", *args]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_script_for_real(tmp_path: pathlib.Path) -> None:
    """Report, JSON and dumps; a check that fails has its own exit status, and says why."""
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    args = ("--nproc_per_node", "4", "--steps", "3", "--max-recompiles", "0", "--json", "out.json", "--dump-hlo", "hlo", "train.py", "16")
    (tmp_path / "tmp").mkdir()
    found = run(tmp_path, *args, TMPDIR=str(tmp_path / "tmp"))
    assert found.returncode == inspect_run.CHECK_FAILED, found.stderr
    assert list((tmp_path / "tmp").glob("nxd_jax-profile*")) == []
    assert found.stdout.count("loss") == 3  # the third run of the first batch size is in the fourth step
    assert "--max-recompiles 0: 1 program compiled again" in found.stderr
    assert "was float32[4, 8], now float32[6, 8] at train.py:" in found.stderr
    page = (tmp_path / "report.html").read_text()
    check(page)
    assert "nxd-inspect train.py" in page and "--max-recompiles 0" in page and "Host time" in page
    assert "nxd-inspect --trace DIR keeps the trace" in page and "ui.perfetto.dev" not in page
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["memory"]["fits"] and {c["kind"] for c in data["collectives"]} == {"all-reduce"}
    assert [c["like"] is None for c in data["recompiles"]] == [True, False]
    assert all((f / "optimized_hlo.txt").exists() for f in (tmp_path / "hlo").iterdir()) and len(list((tmp_path / "hlo").iterdir())) == 2


def test_a_trace_that_is_kept(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    found = run(tmp_path, "--nproc_per_node", "2", "--trace", "kept", "--steps", "2", "train.py", "16")
    assert found.returncode == 0, found.stderr
    assert list((tmp_path / "kept").rglob("perfetto_trace.json.gz"))
    assert "drop " in (page := (tmp_path / "report.html").read_text()) and "perfetto_trace.json.gz" in page and "are removed" not in page


def test_on_shapes_alone_over_the_memory(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    args = ("--abstract", "--instance", "trn1.2xlarge", "--fail-if-over-hbm", "-o", "plan.html", "train.py", "500000000")
    found = run(tmp_path, *args)
    assert found.returncode == inspect_run.CHECK_FAILED, found.stderr
    assert "--fail-if-over-hbm: peak" in found.stderr and "does not fit" in found.stderr
    page = (tmp_path / "plan.html").read_text()
    check(page)
    assert "on shapes alone; the training step ran 2 times" in page


def test_a_script_that_fails_is_reported_all_the_same(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    found = run(tmp_path, "--nproc_per_node", "2", "--steps", "0", "--no-profile", "train.py", "16", "fail")
    assert found.returncode == 1
    assert "RuntimeError: the script is broken" in found.stderr and "wrote" in found.stderr
    assert "the script ended with exit status 1" in (tmp_path / "report.html").read_text()


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "args",
    [
        ("mlp_digits.py",),
        ("llama/train.py", "--tp", "8", "--batch", "1"),
        ("lightning_linear.py",),
    ],
    ids=lambda args: args[0],
)
def test_examples(tmp_path: pathlib.Path, args: Any) -> None:
    """A report under 5 MB that opens without a network."""
    machine = ("--instance", "trn1.32xlarge") if "--tp" in args else ()
    found = run(tmp_path, *machine, str(ROOT / "examples" / args[0]), *args[1:])
    assert found.returncode == 0, found.stderr
    check((tmp_path / "report.html").read_text())


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["missing.py"], "no such script: missing.py"),
        (["--steps", "-1", "x.py"], "'-1' must be a whole number, 0 or more"),
        (["--max-recompiles", "few", "x.py"], "'few' must be a whole number, 0 or more"),
        (["-o", ".", __file__], "is a folder; give the name of a file in it"),
        (["--instance", "trn9", __file__], "no instance is called 'trn9'"),
    ],
)
def test_bad_options(args: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        inspect_run.main(args)
    assert text in f"{raised.value} {capsys.readouterr().err}"


def test_nothing_on_xla(tmp_path: pathlib.Path) -> None:
    (tmp_path / "plain.py").write_text("print('no tensors')\n")
    found = run(tmp_path, "plain.py")
    assert found.returncode == 1 and "ran no program on device 'xla': does it use that device" in found.stderr
    assert not (tmp_path / "report.html").exists()
