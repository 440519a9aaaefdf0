"""`nxd-run`: its options and what scripts see; and one script's numbers under it and under torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nxd_jax import run

ROOT = Path(__file__).parent.parent.parent


def variables(*options: str) -> dict[str, str]:
    return run.environment(run.parser().parse_args([*options, "script.py"]))[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--nproc_per_node", "8"], {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "NXD_JAX_WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0"}),
        (["--nproc-per-node=2", "--nnodes=2"], {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}),
        (["--nproc_per_node", "2", "--nnodes", "1:4"], {"WORLD_SIZE": "8"}),
        (["--instance", "trn1.32xlarge"], {"WORLD_SIZE": "32", "NXD_JAX_INSTANCE": "trn1.32xlarge", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn1"}),
        (["--instance", "trn1.32xlarge", "--nnodes", "2"], {"WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "32", "NXD_JAX_NNODES": "2"}),
        (["--instance", "trn1.2xlarge"], {"WORLD_SIZE": "2"}),
        (["--instance", "trn1.32xlarge", "--nproc_per_node", "8"], {"WORLD_SIZE": "8", "NEURON_RT_NUM_CORES": "8"}),
        (["--instance", "trn2.48xlarge"], {"WORLD_SIZE": "64", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}),
        (["--instance", "trn2.48xlarge", "--lnc", "1"], {"WORLD_SIZE": "128", "NEURON_LOGICAL_NC_CONFIG": "1"}),
        (["--nproc_per_node", "2", "--master_addr", "10.0.0.1", "--master-port", "41000"], {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "41000"}),
        (["--nproc_per_node", "2", "--standalone", "--max_restarts", "3", "--rdzv_backend", "c10d", "--node_rank", "0"], {"WORLD_SIZE": "2"}),
    ],
)  # fmt: skip
def test_options(options: list[str], expected: dict[str, str]) -> None:
    found = variables(*options)
    assert {name: found.get(name) for name in expected} == expected


def test_variables_that_are_not_set() -> None:
    assert "NXD_JAX_INSTANCE" not in variables("--nproc_per_node", "2")
    assert not {"NEURON_RT_NUM_CORES", "NEURON_LOGICAL_NC_CONFIG"} & variables("--instance", "trn1.32xlarge").keys()


def test_the_line_that_says_what_is_emulated() -> None:
    line = run.environment(run.parser().parse_args(["--instance", "trn1.32xlarge", "--nnodes", "2", "x.py"]))[1]
    assert line == "nxd-run: 2 x trn1.32xlarge, 64 ranks (32 per machine) in one process"


def test_options_after_the_script(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The script gets them, and that is said; not of options that scripts have, nor of those that stand before it too."""
    script = tmp_path / "s.py"
    script.write_text("import sys; print(sys.argv[1:])")
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "argv", sys.argv.copy())
    monkeypatch.setattr(sys, "path", sys.path.copy())
    run.main(["--nproc_per_node", "2", str(script), "--topology", "--lnc=2", "--steps", "3"])
    shown = capsys.readouterr()
    assert shown.out == "['--topology', '--lnc=2', '--steps', '3']\n"
    line = f"nxd-run: --topology, --lnc comes after {script}, so the script gets it: options of nxd-run come before the script"
    assert line in shown.err.splitlines()
    run.main(["--nproc_per_node", "2", str(script), "--nproc_per_node", "4", "--steps=3"])
    assert "comes after" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--instance", "trn9.huge"], "trn1.32xlarge"),
        (["--instance", "trn1.32xlarge", "--nproc_per_node", "64"], "--nproc_per_node 64: trn1.32xlarge has 32 cores per machine"),
        (["--instance", "trn1.32xlarge", "--nproc_per_node", "-1"], "has 32 cores per machine"),
        (["--instance", "trn1.32xlarge", "--lnc", "2"], "lnc"),
        ([], "say how many ranks: --instance trn1.32xlarge, or --nproc_per_node 8"),
        (["--nproc_per_node", "0"], "say how many ranks"),
        (["--nproc_per_node", "2", "--nnodes", "0"], "--nnodes 0: must be a positive number"),
        (["--nproc_per_node", "2", "--nnodes", "two"], "--nnodes two: must be a positive number"),
    ],
)
def test_numbers_that_do_not_fit(options: list[str], text: str) -> None:
    with pytest.raises(SystemExit, match=text) as found:
        variables(*options)
    assert str(found.value).startswith("nxd-run: ")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--nproc_per_node", "two", "x.py"], "invalid int value"),
        (["--nproc_per_node", "2"], "script"),
        (["--proc", "2", "x.py"], "script|unrecognized"),
    ],
)
def test_usage_errors(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as found:
        run.main(argv)
    assert found.value.code == 2 and re.search(text, capsys.readouterr().err)


# -- in a process of its own ------------------------------------------------------------------------


def launch(command: list[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("NXD_JAX", "NEURON", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "JAX_NUM_CPU"))
    }
    path = os.pathsep.join([str(ROOT), str(ROOT / "aliases")])
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env={**clean, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **env},
        check=False,
    )


SHOW = """
import json, os, sys
print(json.dumps({"argv": sys.argv, "name": __name__, "world": os.environ["WORLD_SIZE"], "path": sys.path[0], "helper": __import__("helper").VALUE}))
"""


def test_a_script_and_a_module(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "helper.py").write_text("VALUE = 3\n")
    script = launch(
        ["-m", "nxd_jax.run", "--nproc_per_node", "4", str(tmp_path / "show.py"), "--epochs", "3", "--nproc_per_node", "9", "-m"], ROOT
    )
    assert script.returncode == 0, script.stderr
    found = json.loads(script.stdout)
    assert found["argv"] == [str(tmp_path / "show.py"), "--epochs", "3", "--nproc_per_node", "9", "-m"]
    assert (found["name"], found["world"], found["helper"], found["path"]) == ("__main__", "4", 3, str(tmp_path))
    assert script.stderr.strip() == "nxd-run: 1 machine(s), 4 ranks (4 per machine) in one process"
    module = launch(["-m", "nxd_jax.run", "--instance", "trn1.2xlarge", "--topology", "-m", "show", "--x"], tmp_path)
    assert module.returncode == 0, module.stderr
    assert json.loads(module.stdout)["argv"][1:] == ["--x"] and json.loads(module.stdout)["world"] == "2"
    first, *picture = module.stderr.splitlines()
    assert first == "nxd-run: 1 x trn1.2xlarge, 2 ranks (2 per machine) in one process" and any("trn1.2xlarge" in line for line in picture)


def test_scripts_that_fail(tmp_path: Path) -> None:
    (tmp_path / "stop.py").write_text("import sys\nsys.exit(7)\n")
    assert launch(["-m", "nxd_jax.run", "--nproc_per_node", "2", "stop.py"], tmp_path).returncode == 7
    missing = launch(["-m", "nxd_jax.run", "--nproc_per_node", "2", "nowhere.py"], tmp_path)
    assert missing.returncode == 1 and "nxd-run: no such script: nowhere.py" in missing.stderr


TRAINING = '''
"""A tensor-parallel MLP written by hand, tp 2 x dp 2: prints every rank's numbers as JSON."""
import json

import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_backend
from neuronx_distributed.parallel_layers import parallel_state as ps
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("xla")
ps.initialize_model_parallel(tensor_model_parallel_size=2)
group, tp, dp = ps.get_tensor_model_parallel_group(), ps.get_tensor_model_parallel_rank(), ps.get_data_parallel_rank()
torch.manual_seed(0)


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return xm.all_reduce("sum", x, groups=group._mesh)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=group)
        return grad


def part(weight, dim):
    n = weight.shape[dim] // 2
    return torch.nn.Parameter(weight.to("xla").narrow(dim, tp * n, n).clone())


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = part(torch.randn(16, 6), 0), part(torch.randn(3, 16), 1)
        self.norm = torch.nn.LayerNorm(6).to("xla")

    def forward(self, x):
        return Sum.apply(torch.tanh(Copy.apply(self.norm(x)) @ self.up.t()) @ self.down.t())


model = Mlp()
data = TensorDataset(torch.randn(64, 6), torch.randn(64, 3))
sampler = DistributedSampler(data, ps.get_data_parallel_size(), dp, shuffle=True, seed=1, drop_last=True)
loader = pl.MpDeviceLoader(DataLoader(data, batch_size=4, sampler=sampler), "xla")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
losses = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    for step, (x, y) in enumerate(loader):
        if step == 5:
            break
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        xm.reduce_gradients(optimizer, groups=ps.get_data_parallel_group(as_list=True))
        torch.nn.utils.clip_grad_norm_([model.norm.weight, model.norm.bias], 0.5)
        optimizer.step()
        losses.append(loss.detach())
mine = {
    "rank": dist.get_rank(), "tp": tp, "dp": dp, "losses": [l.item() for l in losses], "up": model.up.detach(), "down": model.down.detach(),
    "norm": model.norm.weight.detach(), "mean": xm.mesh_reduce("loss", losses[-1].item(), lambda found: sum(found) / len(found)),
}
everyone = [None] * 4
dist.all_gather_object(everyone, mine)
if dist.get_rank() == 0:
    print(json.dumps([{k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in m.items()} for m in everyone]), flush=True)
dist.barrier()
'''


def _flat(x: Any) -> list[float]:
    return [v for e in x for v in _flat(e)] if isinstance(x, list) else [x]


@pytest.mark.slow
def test_the_same_numbers_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    one = launch(["-m", "nxd_jax.run", "--nproc_per_node", "4", "train.py"], tmp_path)
    assert one.returncode == 0, one.stderr
    many = launch(["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4", "train.py"], tmp_path, OMP_NUM_THREADS="1")
    assert many.returncode == 0, many.stderr
    hosted, separate = (json.loads(r.stdout.strip().splitlines()[-1]) for r in (one, many))
    assert [m["rank"] for m in hosted] == [0, 1, 2, 3] == [m["rank"] for m in separate]
    for ours, theirs in zip(hosted, separate, strict=True):
        assert (ours["tp"], ours["dp"]) == (theirs["tp"], theirs["dp"]) == (ours["rank"] % 2, ours["rank"] // 2)
        for name in ("losses", "up", "down", "norm"):
            assert _flat(ours[name]) == pytest.approx(_flat(theirs[name]), rel=1e-5, abs=1e-6), (ours["rank"], name)
        assert len(ours["losses"]) == 10 and ours["mean"] == pytest.approx(theirs["mean"], rel=1e-5)
    assert hosted[0]["losses"] != hosted[2]["losses"] and hosted[0]["losses"] == hosted[1]["losses"]
    assert hosted[0]["up"] != hosted[1]["up"] and hosted[0]["up"] == hosted[2]["up"] and hosted[0]["norm"] == hosted[3]["norm"]
