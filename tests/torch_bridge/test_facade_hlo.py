"""`torch_bridge.hlo`, dumps, and what happens to XLA_FLAGS."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import nn

import torch_bridge
from torch_bridge.config import environment
from torch_bridge.device.startup import dispatch
from torch_bridge.export import hlo_text
from torch_bridge.ir import graph_text
from torch_bridge.runtime import executor, session

pytestmark = pytest.mark.usefixtures("clean_step")
ROOT = pathlib.Path(__file__).parents[2]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.first(x)).relu()


@pytest.mark.parametrize("device", ["cpu", "xla", "meta"])
def test_stablehlo_of_a_module(device: str) -> None:
    text = torch_bridge.hlo(Model().to(device), torch.ones(2, 4))
    assert "module @jit_Model" in text and "stablehlo.dot_general" in text
    assert "first/test_facade_hlo.py:" in text and "aten.addmm" in text


def test_optimized_hlo_of_a_module_and_of_a_captured_graph() -> None:
    captured = torch_bridge.capture(Model(), torch.ones(2, 4))
    for target, inputs in ((Model().eval(), (torch.ones(2, 4),)), (captured, ())):
        text = torch_bridge.hlo(target, *inputs, stage="optimized")
        assert text.startswith("HloModule") and 'op_name="jit(' in text and "first/test_facade_hlo.py:" in text


def test_pending_tensors_are_not_run() -> None:
    x = torch.full((3, 4), 2.0, device="xla")
    torch_xla.sync()
    y = x.t() * 3
    view = y[1]
    nodes = list(dispatch.STATE.session.current.nodes)
    for target in (y, [view, x], {"a": (y, view)}):
        text = torch_bridge.hlo(target)
        assert "stablehlo" in text or "func.func" in text
    assert "tensor<3xf32>" in torch_bridge.hlo(view)
    assert "tensor<4x3xf32>" in xm.get_stablehlo([y])
    assert xm.get_stablehlo_bytecode([y])[:4] == b"ML\xefR"
    assert dispatch.STATE.session.current.nodes == nodes and y._storage.pending
    assert view.tolist() == [6.0, 6.0, 6.0]
    assert "func.func" in torch_bridge.hlo(x)


def test_asking_for_hlo_does_not_recompile_a_step() -> None:
    def step(look: bool) -> None:
        x = torch.full((5, 7), 2.0, device="xla")
        y = (x * 3)[2]
        if look:
            torch_bridge.hlo(y)
        torch_xla.sync()

    step(False)
    step(False)
    before = executor.metrics.COMPILE_TIME.count
    step(True)
    step(False)
    assert executor.metrics.COMPILE_TIME.count == before


def test_last_graphs() -> None:
    x = torch.full((2, 11), 2.0, device="xla") @ torch.ones(11, 2, device="xla")
    torch_xla.sync()
    text = torch_bridge.hlo()
    assert text.startswith("// graph 1 of ") and "tensor<2x11xf32>" in text
    assert "HloModule" in torch_bridge.hlo(stage="optimized")
    assert x.shape == (2, 2)


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="stage must be one of 'stablehlo', 'optimized', got 'mhlo'"):
        torch_bridge.hlo(stage="mhlo")
    with pytest.raises(TypeError, match="got function; wrap a function"):
        torch_bridge.hlo(lambda x: x)
    with pytest.raises(TypeError, match="xla tensors or None, got Tensor"):
        torch_bridge.hlo(torch.ones(2))
    monkeypatch.setattr(session.current(), "recent", type(session.current().recent)())
    with pytest.raises(ValueError, match="no graph has run yet"):
        torch_bridge.hlo()


def test_graph_text_names_shapes_and_lines() -> None:
    y = torch.ones(2, 3, device="xla").sum(0) * 2
    text = graph_text.graph_text(hlo_text.pending_graph([y]))
    assert "float32[3] = aten.sum.dim_IntList" in text and "test_facade_hlo.py" in text and text.splitlines()[-1].startswith("return ")


# -- environment ----------------------------------------------------------------------------------


def test_unknown_flags_are_dropped_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_checked", None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/somewhere --xla_neuron_only=3 --xla_dump_hlo_as_text")
    with pytest.warns(UserWarning, match=r"dropped from XLA_FLAGS.*--xla_neuron_only=3"):
        environment.prepare()
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=/tmp/somewhere --xla_dump_hlo_as_text"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        environment.prepare()


@pytest.mark.parametrize("flags", ["", "--xla_force_host_platform_device_count=2", "a_file_of_flags"])
def test_known_flags_stay(monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    monkeypatch.setattr(environment, "_checked", None)
    monkeypatch.setenv("XLA_FLAGS", flags)
    environment.prepare()
    assert os.environ["XLA_FLAGS"] == flags


def script(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "aliases")])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **env},
        cwd=env.get("CWD", "/"),
    )


SMALL = "import torch, torch_xla; y = torch.ones(3, 4, device='xla') * 2; torch_xla.sync(); print(y.sum().item())"


def test_xla_dump_to(tmp_path: pathlib.Path) -> None:
    done = script(
        SMALL, XLA_FLAGS=f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text --xla_nobody_knows_this", JAX_ENABLE_COMPILATION_CACHE="0"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "24.0" and "xla_nobody_knows_this" in done.stderr
    assert list(tmp_path.glob("*.txt"))


def test_neuron_framework_debug(tmp_path: pathlib.Path) -> None:
    done = script(SMALL, NEURON_FRAMEWORK_DEBUG="1", CWD=str(tmp_path))
    assert done.returncode == 0, done.stderr
    folders = sorted(tmp_path.glob("MODULE_*"))
    assert folders and {p.name for p in folders[0].iterdir()} == {"graph.txt", "stablehlo.mlir", "optimized_hlo.txt"}
    assert any("aten.mul" in (f / "graph.txt").read_text() for f in folders)
    elsewhere = tmp_path / "deep" / "dumps"
    done = script(SMALL, NEURON_FRAMEWORK_DEBUG="1", NEURON_DUMP_DIR=str(elsewhere))
    assert done.returncode == 0 and len(list(elsewhere.glob("MODULE_*"))) == len(folders)
    assert "HloModule" in next(elsewhere.glob("MODULE_*/optimized_hlo.txt")).read_text()


@pytest.mark.parametrize(
    ("flags", "debug", "wanted"),
    [
        ("", "", False),
        ("--xla_force_host_platform_device_count=2", "0", False),
        ("--xla_cpu_enable_fast_math=false --xla_dump_to=/tmp/x", "", True),
        ("-xla_dump_hlo_as_text", "", True),
        ("a_file_of_flags", "", True),
        ("no_such_file", "", False),
        ("", "1", True),
    ],
)
def test_whether_dumps_are_asked_for(flags: str, debug: str, wanted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "a_file_of_flags").write_text("--xla_cpu_enable_fast_math=false\n--xla_dump_to=/tmp/x\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("NEURON_FRAMEWORK_DEBUG", debug)
    assert environment.dumping() == wanted
