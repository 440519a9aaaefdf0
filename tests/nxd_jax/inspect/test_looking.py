"""What can be looked at, and what an inspection gives: text, HTML, data, JSON, a module that runs, dumps."""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Iterator

import pytest
import torch
import torch_xla
from torch import nn

import nxd_jax
import torch_bridge
from nxd_jax import inspect
from nxd_jax.topology import Topology
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.inspect.pages import read_html
from tests.nxd_jax.inspect.small import Model, train
from torch_bridge import metrics
from torch_bridge.device.startup import dispatch
from torch_bridge.runtime import session

IDS = torch.zeros(2, 5, dtype=torch.int64)


@pytest.fixture(scope="module")
def step() -> Iterator[inspect.Inspection]:
    """The second step of a small model's training. (What was trained lives on: inputs are named after what holds them.)"""
    trained, found = train()
    yield found
    del trained


# -- what can be looked at -------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "xla", "meta"])
def test_a_module(device: str) -> None:
    found = inspect.look(Model().to(device), IDS)
    assert found.name == "module Model" and found.runs == 0 and found.compile_seconds == 0 and found.axes == {} and not found.others
    inputs = found.graph.where(op="input")
    assert [n.module for n in inputs][:3] == ["embed.weight", "head.weight", "head.bias"]
    kinds = {h.name: h.kind for h in found.memory.held}
    assert kinds["layers.1.down.bias"] == "parameter" and "input" in kinds.values() and "result" in kinds.values()
    assert {n.phase for n in found.graph if n.op.startswith("aten.")} <= {"forward", "outside"}


def test_a_captured_graph() -> None:
    captured = torch_bridge.capture(Model(), IDS)
    found, fresh = inspect.look(captured), inspect.look(Model(), IDS)
    assert [n.op for n in found.graph] == [n.op for n in fresh.graph] and found.costs.flops == fresh.costs.flops
    assert found.stablehlo.modules() == fresh.stablehlo.modules()


def test_tensors_that_wait_are_not_run() -> None:
    x = torch.full((3, 4), 2.0, device="xla")
    torch_xla.sync()
    y = (x.t() @ x).relu()
    view = y[1]
    recorded, runs = list(dispatch.STATE.session.current.nodes), metrics.EXECUTE_TIME.count
    for target in (view, [y, view], {"a": (y,)}):
        found = inspect.look(target)
        assert found.name == "what is recorded" and found.costs.flops == 2 * 4 * 4 * 3
        assert found.memory.peak > 0 and "aten.mm" in str(found.graph) and "stablehlo.dot_general" in str(found.stablehlo)
    assert inspect.look(y, view).graph[-1].inputs == inspect.look([y, view]).graph[-1].inputs
    assert dispatch.STATE.session.current.nodes == recorded and metrics.EXECUTE_TIME.count == runs and y._storage.pending  # type: ignore[attr-defined]
    assert view.tolist() == [12.0] * 4


def test_a_tensor_that_waits_on_several_ranks(nxd: Nxd) -> None:
    nxd(4, tp=4)
    from nxd_jax.parallel_layers import ColumnParallelLinear

    layer = ColumnParallelLinear(8, 16, bias=False, gather_output=True).to("xla")
    out = layer(torch.ones(2, 8).to("xla"))
    found = inspect.look(out)
    assert found.axes["tp"] == 4 and found.costs.flops == 2 * 2 * 8 * 4
    assert [(c.kind, c.axes, c.ranks) for c in found.collectives] == [("all-gather", ("tp",), 4)]
    assert "tp 4" in str(found)


def test_the_last_step(step: inspect.Inspection) -> None:
    assert step.runs == 2 and step.name.startswith("the program at small.py:") and step.compile_seconds > 0
    assert {h.kind for h in step.memory.held} == {"parameter", "optimizer state", "input"}
    assert {n.phase for n in step.graph if n.op.startswith("aten.")} == {"forward", "backward", "outside"}


def test_a_step_of_several_programs() -> None:
    """The largest is what is looked at; the others are there too, the larger ones first."""
    x = torch.ones(3, device="xla")
    torch_xla.sync()
    (x + 1).sum().item()
    a, b = torch.ones(3, 4, device="xla"), torch.ones(4, 3, device="xla")
    product = (a @ b * 2).relu() + 1
    product.cpu()
    torch_xla.sync()
    found = inspect.look()
    assert "aten.mm" in str(found.graph) and len(found.others) == 1
    assert "aten.sum" in str(found.others[0].graph) and len(found.others[0].graph) < len(found.graph)
    assert "also          1 smaller program in" in str(found)
    torch_xla.sync()
    assert "aten.mm" in str(inspect.look().graph), "an empty step is none"
    del product
    (x * 3).cpu()
    assert "aten.mm" in str(inspect.look().graph), "a step that has not ended is not the last one"


def test_a_program() -> None:
    train(steps=1)
    program = session.current().recent[-1]
    assert inspect.look(program).program is program


def test_an_abstract_run_inside_and_after_its_block() -> None:
    with nxd_jax.abstract_run(1, values="zeros") as run:
        with pytest.raises(ValueError, match=r"abstract run has recorded nothing yet: within the `with` block, run a training step"):
            inspect.look(run)
        _, inside = train()
        again = inspect.look(run)
        assert str(inside.graph) == str(again.graph) and inside.costs.flops == again.costs.flops > 0
        assert inside.memory.peak > 0 and inside.topology.hbm_per_core == run.topology.hbm_per_core
        assert "run 2 times" in str(inside)
    with pytest.raises(
        RuntimeError, match=r"look\(\) after the end of abstract_run: call it within the `with` block, where the ranks are laid out"
    ):
        inspect.look(run)
    assert "run 2 times" in str(inside), "what was worked out stays"


def test_parts_that_were_not_asked_for_in_time() -> None:
    """The mesh of an abstract run is gone after its block."""
    with nxd_jax.abstract_run(2):
        x = torch.ones(2, 3).to("xla")
        y = x @ x.t()
        torch_xla.sync()
        early, late = inspect.look(), inspect.look()
        assert early.costs.flops == 2 * 2 * 2 * 3 and y is not None
    assert early.costs.flops == 24
    with pytest.raises(
        RuntimeError, match=r"recorded on ranks that are gone: look at it while they are laid out \(within the `with` block of abstract_run"
    ):
        _ = late.costs


def test_nothing_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session.current(), "recent", type(session.current().recent)())
    with pytest.raises(
        ValueError, match=r"nothing has run yet in this process: run a training step \(xm.mark_step\(\) ends it\), or look at a module"
    ):
        inspect.look()


@pytest.mark.parametrize("target", [3, "model", lambda x: x, torch.ones(2), [], [torch.ones(2)]])
def test_other_things_are_refused(target: object) -> None:
    with pytest.raises(
        TypeError, match="look takes nothing .the last step., an abstract run, an nn.Module with example inputs, or xla tensors, got"
    ):
        inspect.look(target)


def test_a_machine_of_ones_own() -> None:
    found = inspect.look(Model(), IDS, topology=Topology("trn2.48xlarge", lnc=2))
    assert found.memory.hbm_bytes == 24 * 2**30 and "Trainium2 at LNC 2" in found.memory.verdict


# -- what it gives ---------------------------------------------------------------------------------------


def test_text(step: inspect.Inspection) -> None:
    lines = str(step).splitlines()
    assert lines[0].startswith("the program at small.py:") and lines[0].endswith("one rank, run 2 times")
    assert [line.split()[0] for line in lines[1:]] == ["memory", "operations", "collectives", "compiled", "see"]
    assert repr(step) == str(step) and "no rank communicates" in str(step)


def test_html(step: inspect.Inspection) -> None:
    page = read_html(step._repr_html_())
    assert page.tags.count("table") == 3 and "Memory of a core" in page.text and "Operations by module" in page.text
    assert "http" not in step._repr_html_()


def test_data_and_json(step: inspect.Inspection, tmp_path: pathlib.Path) -> None:
    data = step.data()
    assert set(data) == {"name", "axes", "runs", "compile_seconds", *inspect.inspection.PARTS}
    assert json.loads(step.save(tmp_path / "a" / "step.json").read_text()) == data
    assert len(data["graph"]) == len(step.graph) and data["graph"][-1]["op"] == "output"
    memory = data["memory"]
    assert memory["peak"] == step.memory.peak == sum(memory["kinds"].values()) and memory["fits"] is True
    assert sum(c["flops"] for c in data["costs"]) == step.costs.flops and data["collectives"] == []
    assert set(json.loads(step.save(tmp_path / "m.json", "memory").read_text())) == {"name", "axes", "runs", "compile_seconds", "memory"}
    with pytest.raises(ValueError, match="'hlo' must be one of 'graph', 'collectives', 'memory', 'costs'"):
        step.data("memory", "hlo")


def test_the_graph_runs_in_eager_torch() -> None:
    """A module's graph gives the module's numbers, bit for bit."""
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    found = inspect.look(model, x)
    (result,) = torch.utils._pytree.tree_leaves(found.fx(*dict(model.named_parameters()).values(), x))
    assert torch.equal(result, model(x))
    assert "torch.ops.aten.addmm" in found.fx.code


def test_the_graph_of_a_step_runs_in_eager_torch() -> None:
    x, w = torch.randn(3, 4), torch.randn(4, 2)
    on_x, on_w = x.to("xla"), w.to("xla")
    torch_xla.sync()
    y = (on_x @ on_w).tanh() * 2
    torch_xla.sync()
    found = inspect.look()
    given = {(3, 4): x, (4, 2): w}
    arguments = [given[n.shape] if n.shape in given else torch.tensor([2.0], dtype=torch.float64) for n in found.graph.where(op="input")]
    (result,) = torch.utils._pytree.tree_leaves(found.fx(*arguments))
    assert torch.allclose(result, y.cpu(), atol=1e-6)


def test_nodes(step: inspect.Inspection) -> None:
    mm = step.graph.where(module="layers.1.up", op="aten.addmm", phase="forward")[0]
    assert mm.where.startswith("small.py:") and mm.function == "forward" and mm.training
    assert (mm.dtype, mm.shape) == ("float32", (10, 16)) and len(mm.inputs) == 3
    again = step.graph.where(module="layers.1.up", phase="backward")
    assert {n.line for n in again} == {mm.line} and {"aten.mm", "aten.sum.dim_IntList"} <= {n.op for n in again}
    names = {n.module for n in step.graph.where(op="input")}
    assert {"layers.0.up.weight", "exp_avg of layers.0.up.weight"} <= names
    total = next(n for n in step.graph if n.op == "aten.sum.dim_IntList")
    assert "dim=[0]" in total.arguments


def test_code_of_an_earlier_run_is_said_to_be(
    step: inspect.Inspection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """JAX's cache on disk takes programs that differ in nothing but source lines for the same."""
    again = inspect.look(step.program)
    assert not again.optimized.note

    class Found:
        def as_text(self) -> str:
            return step.optimized.text.replace("small.py:", "another.py:")

    stale = inspect.look(step.program)
    monkeypatch.setattr(step.program, "compiled", Found())
    with caplog.at_level(logging.INFO, "nxd_jax"):
        assert stale.optimized.note.startswith(
            "found in a cache on disk, with the module names and source lines of the run that compiled it"
        )
    assert f"the optimized HLO of {stale.name}: found in a cache on disk" in caplog.text


def test_lines_of_notebook_cells_are_the_graphs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells are called by their number in HLO; that is no sign of another run."""
    import types

    import IPython

    from nxd_jax.inspect import nodes
    from torch_bridge.source import Source

    cell = "/somewhere/ipykernel_7/594265050.py"
    shell = types.SimpleNamespace(compile=types.SimpleNamespace(_filename_map={cell: 3}))
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    graph = torch.fx.Graph()
    graph.call_function(torch.ops.aten.relu.default, ()).meta["source"] = Source(file=cell, line=12)
    assert not nodes.of_another_run(graph, ["In[3]:12", ""])
    assert nodes.of_another_run(graph, ["In[3]:12", "In[2]:12"])
