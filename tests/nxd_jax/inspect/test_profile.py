"""`profile`: its numbers against the trace's, its edges, the readers on made-up traces, and the timeline's picture."""

from __future__ import annotations

import gzip
import io
import json
import logging
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import torch
import torch_xla
import torch_xla.debug.profiler as xp

from nxd_jax.inspect.pictures import figures, timeline
from nxd_jax.inspect.pictures.timeline import timeline_picture
from nxd_jax.inspect.profiling import DeviceRow, DeviceSpan, HostSpan, Profile, StepRow, attribution, profile, reading, results, summary
from nxd_jax.inspect.profiling import hosting as hosts
from nxd_jax.inspect.profiling.instructions import Instruction, parse
from nxd_jax.inspect.profiling.reading import Mark, Op
from nxd_jax.inspect.tables import Table
from torch_bridge.runtime import executor, session
from torch_bridge.telemetry import activity

STEPS = 3


class Model(torch.nn.Module):
    """A heavy module and a light one."""

    def __init__(self) -> None:
        super().__init__()
        self.heavy = torch.nn.Linear(512, 512)
        self.light = torch.nn.Linear(512, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.light(self.heavy(x).relu())


class Block(torch.nn.Module):
    """A layer such as there are many of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def stepper(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        return loss

    return step


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Three steps of the model, profiled after two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NXD_JAX_FUSED_OPTIMIZERS", raising=False)
        step = stepper(Model().to("xla"), torch.randn(256, 512).to("xla"))
        step()
        step()
        with profile(tmp_path_factory.mktemp("trace")) as found:
            assert not found.done and "not there yet" in str(found)
            for _ in range(STEPS):
                loss = step()
            loss.item()
    return found


@pytest.fixture(scope="module")
def small() -> Callable[[], Any]:
    """A step of next to no work."""
    weight, x = torch.ones(4, 4).to("xla"), torch.ones(2, 4).to("xla")

    def step() -> torch.Tensor:
        y = (x @ weight).sum()
        torch_xla.sync()
        return y

    step()
    return step


# -- the numbers -----------------------------------------------------------------------------------


def test_the_heavy_module_is_the_heaviest(measured: Profile) -> None:
    modules = {r.module: r for r in measured.modules}
    heavy, light = modules["heavy"], modules["light"]
    assert heavy.seconds > light.seconds
    assert (
        heavy.forward > 3 * light.forward or heavy.backward > 3 * light.backward
    )  # an instruction during which the machine did something else: in one
    assert heavy.forward > 0 and heavy.backward > 0 and heavy.other == 0
    assert modules[results.OUTSIDE].other > 0  # the optimizer
    assert max((r for r in measured.modules if r.module not in (results.OUTSIDE, results.COMPILER)), key=lambda r: r.seconds) is heavy
    assert measured.known > 0.6  # the rest is XLA's own time between instructions, more of it on a busy machine


def test_every_table_adds_up_to_the_device_time(measured: Profile) -> None:
    for table in (measured.modules, measured.ops, measured.instructions, measured.executables, measured.to(1)):
        assert sum(r.seconds for r in table) == pytest.approx(measured.device_seconds)
        assert sum(r.share for r in table) == pytest.approx(1)
        assert [r.seconds for r in table] == sorted((r.seconds for r in table), reverse=True)
    assert sum(r.seconds for r in measured.devices) == pytest.approx(measured.device_seconds)
    assert all(0 < r.busy <= measured.seconds and r.busy <= r.seconds * 1.0001 for r in measured.devices)


def test_the_device_time_is_the_traces(measured: Profile) -> None:
    """Against the JSON that the profiler itself wrote, which no code of ours had in its hands."""
    with gzip.open(measured.perfetto) as file:
        trace = json.load(file)
    assert "metadata" not in trace
    events = [e for e in trace["traceEvents"] if "hlo_op" in e.get("args", {}) and e["args"]["hlo_module"] != "jit_nxd_profile_end"]
    assert len(events) == sum(r.ops for r in measured.devices)
    assert sum(e["dur"] for e in events) * 1e-6 == pytest.approx(measured.device_seconds, rel=1e-3)


def test_the_program_and_its_instructions(measured: Profile) -> None:
    [row] = measured.executables.where(lambda r: r.runs == STEPS)
    assert row.name == activity.describe(session.current().recent[-1]).name and row.source.startswith("test_profile.py:")
    assert row.compile_seconds == 0
    slowest = measured.instructions[0]
    assert (slowest.module, slowest.executable, slowest.count) == ("heavy", row.name, STEPS)
    assert slowest.op in ("aten.mm", "aten.addmm") and slowest.line.startswith("test_profile.py:")
    assert slowest.mean == pytest.approx(slowest.seconds / slowest.count)


def test_the_hosts_phases_fill_the_time(measured: Profile) -> None:
    main = measured.host.where(thread="main")
    assert {r.phase for r in main} == {"record", "prepare", "dispatch", "wait"}
    assert sum(r.seconds for r in main) == pytest.approx(measured.seconds, rel=1e-6)
    assert next(r for r in main if r.phase == "dispatch").count >= STEPS


def test_steps(measured: Profile) -> None:
    assert [r.number for r in measured.steps] == [1, 2, 3]
    for r in measured.steps:
        assert r.record + r.prepare + r.compile + r.dispatch + r.wait == pytest.approx(r.seconds, rel=1e-6)
        assert r.dispatch > 0 and r.compile == 0 and 0 <= r.busy <= r.seconds
    assert measured.steps[0].start == 0 and measured.steps[2].start + measured.steps[2].seconds <= measured.seconds


def test_it_prints_shows_and_saves(measured: Profile, tmp_path: pathlib.Path) -> None:
    from rich.console import Console

    text = str(measured)
    assert (
        "3 steps" in text and "1 device busy" in text and "heavy" in text and "ui.perfetto.dev" in text and "tensorboard --logdir" in text
    )
    assert measured._repr_html_().count("<table") == 7
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(measured)
    assert "Device time by module" in console.export_text()
    data = json.loads(measured.save(tmp_path / "profile.json").read_text())
    assert data["modules"][0]["module"] and len(data["steps"]) == STEPS and data["device_seconds"] == measured.device_seconds
    assert pathlib.Path(data["trace"]).stat().st_size > 0


def test_depth_adds_children_up(measured: Profile) -> None:
    whole = replace(
        measured, modules=results.module_table([results.ModuleRow(f"a.{k}.b", 1, 2, 0, 3, 0) for k in range(3)], 9), device_seconds=9
    )
    assert [(r.module, r.forward, r.backward, r.share) for r in whole.to(1)] == [("a", 3, 6, 1)]
    assert len(whole.to(2)) == 3
    with pytest.raises(ValueError, match=r"'layers.0.mlp' has 3.* got 0"):
        whole.to(0)


# -- edges -----------------------------------------------------------------------------------------


def test_nothing_is_left_behind(small: Callable[[], Any], tmp_path: pathlib.Path) -> None:
    before = session.current().observers
    with pytest.raises(ZeroDivisionError), profile(tmp_path) as found:
        small()
        raise ZeroDivisionError
    assert session.current().observers == before
    assert found.done and len(found.steps) == 1 and found.device_seconds > 0
    assert "the block raised ZeroDivisionError, so this is what ran before" in str(found)
    with profile(tmp_path) as again:  # the profiler is free, and the same folder will do
        small()
    assert again.trace != found.trace and again.done


def test_nothing_ran(tmp_path: pathlib.Path) -> None:
    with profile(tmp_path / "made" / "here") as found:
        pass
    assert "nothing ran on the device" in str(found) and "torch_xla.sync()" in str(found)
    assert len(found.modules) == 0 and found.known == 0 and len(found.host)


def test_one_at_a_time(small: Callable[[], Any], tmp_path: pathlib.Path) -> None:
    with profile(tmp_path) as outer:
        with (
            pytest.raises(RuntimeError, match=r"recorded already, begun at .*test_profile.py:\d+.*End that block first"),
            profile(tmp_path),
        ):
            pass
        small()
    assert outer.device_seconds > 0
    xp.start_trace(tmp_path / "facade")
    with (
        pytest.raises(RuntimeError, match=r"another trace is being recorded .*torch_xla.debug.profiler.*stop that first"),
        profile(tmp_path),
    ):
        pass
    xp.stop_trace()
    assert list((tmp_path / "facade").rglob("*.xplane.pb"))


def test_some_of_the_steps(small: Callable[[], Any], tmp_path: pathlib.Path) -> None:
    with profile(tmp_path, steps=range(1, 3)) as found:
        for _ in range(5):
            small()
    assert [r.number for r in found.steps] == [2, 3] and [r.runs for r in found.executables] == [2]
    with profile(tmp_path, steps=3) as found:
        small()
    assert len(found.steps) == 1 and "steps 0 to 2 were asked for, and the block has only 1" in found.notes
    with profile(tmp_path, steps=range(4, 5)) as found:
        small()
    assert found.done and found.notes[-1] == "nothing was recorded"


@pytest.mark.parametrize("steps", [0, range(0), range(0, 4, 2), -1])
def test_steps_that_are_none(steps: Any) -> None:
    with pytest.raises(ValueError, match=r"at least one step, in a row and from 0 on.*range\(2, 5\)"), profile(steps=steps):
        pass


def test_steps_of_another_type() -> None:
    with pytest.raises(TypeError, match=r"steps must be None, a number of steps or a range.*got 'all'"), profile(steps="all"):  # type: ignore[arg-type]
        pass


def test_a_folder_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(NotADirectoryError, match=r"cannot be written to .*file/trace.*name another folder, or none"),
        profile(tmp_path / "file" / "trace"),
    ):
        pass


def test_compiling_shows_and_alike_programs_are_told_apart(tmp_path: pathlib.Path) -> None:
    weight = torch.ones(4, 4).to("xla")
    inputs = {rows: torch.ones(rows, 4).to("xla") for rows in (3, 5)}
    torch_xla.sync()
    executor.clear_cache()
    with profile(tmp_path) as found:
        for rows in (3, 5):
            for _ in range(rows):
                (inputs[rows] @ weight).cosh().sum().item()
    rows = {r.runs: r for r in found.executables}
    assert rows.keys() == {3, 5} and rows[3].ops * 5 == rows[5].ops * 3 and rows[3].compile_seconds > 0
    assert {r.phase: r for r in found.host}["compile"].seconds > 0
    assert len(found.steps) == 0 and "no step ended" in str(found)


def test_a_thread_that_steps_and_a_program_of_jax(small: Callable[[], Any], tmp_path: pathlib.Path) -> None:
    ours = jax.jit(lambda a: a @ a)
    x = jax.numpy.ones((300, 300))
    ours(x).block_until_ready()
    with profile(tmp_path) as found:
        thread = threading.Thread(target=lambda: [small() for _ in range(2)])
        thread.start()
        thread.join()
        ours(x)  # nobody waits for it or keeps its result
    assert all(r.dispatch > 0 for r in found.steps) and len(found.steps) == 2
    assert len({r.thread for r in found.host}) == 2
    assert found.executables.where(name="jit__lambda")[0].seconds > 0
    assert found.modules.where(module=results.FOREIGN)[0].seconds > 0 and found.known < 1


def test_four_devices_and_folded_layers(nxd: Callable[..., None], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_FOLD", "4")
    nxd(4, tp=2)
    model = torch.nn.Sequential(*(Block() for _ in range(8)), torch.nn.Linear(16, 4)).to("xla")
    step = stepper(model, torch.ones(8, 16).to("xla"))
    step()
    step()
    with profile(tmp_path) as found:
        for _ in range(2):
            step()
    assert [r.device for r in found.devices] == [f"cpu:{k}" for k in range(4)]
    assert len({r.ops for r in found.devices}) == 1
    assert {s.device for s in found.device_spans} == {r.device for r in found.devices}
    [row] = found.executables
    assert row.runs == 2 and row.ops == sum(r.ops for r in found.devices)
    assert any(r.opcode == "while" for r in found.instructions)
    assert any("*" in r.module and r.backward > 0 for r in found.modules)
    assert sum(r.seconds for r in found.modules) == pytest.approx(found.device_seconds)
    assert sum(r.busy for r in found.devices) <= found.device_seconds * 1.0001


# -- the readers, on made-up traces ----------------------------------------------------------------

HLO = """HloModule jit__apply, is_scheduled=true

FileNames
1 "train.py"

%fused.1 (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %x.1 = f32[4]{0} add(%p, %p), metadata={op_name="jit(_apply)/layers.0/train.py:7/aten.add.Tensor/add"}
  ROOT %slice.1 = f32[4]{0} slice(%x.1), metadata={op_name="jit(_apply)/slice"}
}

%fused.2 (p.1: f32[4]) -> f32[4] {
  %p.1 = f32[4]{0} parameter(0)
  ROOT %b.1 = f32[4]{0} bitcast(%p.1), metadata={op_name="jit(_apply)/layers.0/train.py:7/aten.add.Tensor/add"}
}

%fused.3 (p.2: f32[4]) -> f32[4] {
  %p.2 = f32[4]{0} parameter(0)
  %b.2 = f32[4]{0} bitcast(%p.2), metadata={op_name="jit(_apply)/layers.0/train.py:7/aten.add.Tensor/add"}
  ROOT %s.2 = f32[4]{0} dynamic-update-slice(%b.2), metadata={op_name="jit(_apply)/while/body/dynamic_update_slice"}
}

ENTRY %main (a: f32[4]) -> (f32[4], f32[4]) {
  %a = f32[4]{0} parameter(0)
  %while.1 = (s32[], f32[4]{0}, /*index=2*/f32[4]{0:T(128)}) while(%t), condition=%c, body=%b, metadata={op_name="jit(_apply)/while"}
  %fusion.1 = f32[4]{0} fusion(%a), kind=kLoop, calls=%fused.1, metadata={op_name="jit(_apply)/slice"}
  %fusion.2 = f32[4]{0} fusion(%a), kind=kLoop, calls=%fused.2
  %fusion.3 = f32[4]{0} fusion(%a), kind=kLoop, calls=%fused.3
  %dot.1 = f32[4]{0} dot(%a, %a), metadata={op_name="jit(_apply)/backward(layers.*.mlp)/train.py:9/aten.mm/dot_general" stack_frame_id=3}
  %copy.3 = f32[4]{0} copy(%a)
  %sgd = f32[4]{0} add(%a, %a), metadata={op_name="jit(_apply)/train.py:11/torch_bridge.optimizer_step/add"}
  ROOT %tuple.1 = (f32[4]{0}, f32[4]{0}) tuple(%a, %a), metadata={op_name="jit(_apply)/broadcast.7"}
}
"""


def test_instructions_of_hlo() -> None:
    code = parse(HLO)
    found = code.instructions
    assert code.name == "jit__apply"
    assert found["while.1"] == Instruction("while", op="(while)") and found["while.1"].container
    add = Instruction("fusion", "layers.0", "train.py:7", "aten.add.Tensor", "forward")
    assert found["fusion.1"] == add  # its root has no name of ours, what it is for has
    assert found["fusion.2"] == add  # by its root
    assert found["fusion.3"].phase == "compiler"  # a bitcast says nothing
    assert found["dot.1"] == Instruction("dot", "layers.*.mlp", "train.py:9", "aten.mm", "backward")
    assert found["copy.3"] == Instruction("copy", op="(copy)") and found["tuple.1"].op == "(broadcast)"
    assert (found["sgd"].phase, found["sgd"].module) == ("optimizer", "")


def ops_of(*spans: tuple[float, float, str], device: str = "cpu:0", number: int | None = 1) -> list[Op]:
    return [Op(device, start, end, number, 1, "jit__apply", name) for start, end, name in spans]


def test_own_time_of_what_runs_others() -> None:
    """The body of a loop may run on other threads: what counts is the device."""
    ops = ops_of((0, 10, "outer"), (1, 5, "inner"), (2, 3, "a"), (2.5, 4, "b"), (6, 9, "c"))
    own = attribution.own_seconds(ops, [True, True, False, False, False])
    assert own == pytest.approx([10 - 4 - 3, 4 - 2, 1, 1.5, 3])
    other = ops_of((0, 10, "c"), device="cpu:1")
    assert attribution.own_seconds([*ops[:1], *other], [True, False]) == [10, 10]


def test_unions() -> None:
    union = attribution.merged([(4, 5), (0, 2), (1, 3), (3, 3.5)])
    assert union.tolist() == [[0, 3.5], [4, 5]]
    assert [attribution.overlap(union, *at) for at in ((0, 9), (3, 4.5), (3.6, 3.9), (5, 4))] == [4.5, 1.0, 0, 0]
    assert attribution.overlap(attribution.merged([]), 0, 1) == 0


def test_programs_are_found_by_their_instructions() -> None:
    code = parse(HLO)
    one, two = ops_of((0, 1, "dot.1"), number=1), ops_of((2, 3, "dot.1"), (3, 4, "copy.3"), number=2)
    strange = ops_of((5, 6, "other.9"), (6, 7, "copy.3"), (7, 8, "another"), number=3)
    assert attribution.match([*two, *one, *strange], [code, code]) == {("jit__apply", 1): 0, ("jit__apply", 2): 1}
    assert attribution.match(one, [code._replace(name="jit_other")]) == {}


def fake(name: str, **lines: list[tuple[Any, ...]]) -> Any:
    """A plane: lines of (name, start, duration in ns, stats)."""
    made = [
        SimpleNamespace(name=line, events=[SimpleNamespace(name=n, start_ns=s, duration_ns=d, stats=x.items()) for n, s, d, x in events])
        for line, events in lines.items()
    ]
    return SimpleNamespace(name=name, lines=made)


KERNEL = {"hlo_op": "dot.1", "hlo_module": "jit__apply(12)", "program_id": 12}


def test_an_accelerators_trace() -> None:
    host = fake("/host:CPU", python=[("nxd:begin", 5, 0, {}), ("noise", 6, 1, {})], worker=[("launch", 7, 9, KERNEL)])
    streams = {"Stream #1": [("gemm", 1000, 500, KERNEL), ("copy", 1500, 10, {})], "XLA Modules": [("jit", 1000, 900, KERNEL)]}
    found = reading.collect(SimpleNamespace(planes=[fake("/device:GPU:3", **streams), host]), platform="gpu")
    assert [(o.device, o.module, o.name, o.program) for o in found.ops] == [("gpu:3", "jit__apply", "dot.1", 12)]
    assert found.ops[0].end - found.ops[0].start == pytest.approx(500e-9)
    assert found.marks == [Mark("begin", 1, 5e-9, 5e-9)]
    streams["XLA Ops"] = [("dot.1", 1000, 400, KERNEL)]
    found = reading.collect(SimpleNamespace(planes=[fake("/device:TPU:0", **streams)]), platform="tpu")
    assert [o.end for o in found.ops] == [pytest.approx(1.4e-6)]


def test_reading_for_a_limited_time(caplog: pytest.LogCaptureFixture) -> None:
    host = fake("/host:CPU", worker=[("dot.1", k, 1, {**KERNEL, "device_ordinal": 2}) for k in range(4)])
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        found = reading.collect(SimpleNamespace(planes=[host]), limit=-1.0, platform="cpu")
    assert not found.ops and "the files are complete. Profile fewer steps (steps=), or pass limit=None" in caplog.text
    assert found.cut in summary.summarize(found, []).notes
    whole = reading.collect(SimpleNamespace(planes=[host]), limit=None, platform="cpu")
    assert [o.device for o in whole.ops] == ["cpu:2"] * 4 and not whole.cut


def test_host_phases_from_spans() -> None:
    marks = [Mark("begin", 1, 0, 0), Mark("prepare", 1, 1, 5), Mark("dispatch", 1, 2, 3), Mark("wait", 1, 3, 4), Mark("wait", 1, 3.2, 3.4)]
    marks += [Mark("step", 1, 5, 5), Mark("wait", 2, 0.5, 0.75), Mark("end", 1, 6, 6)]
    found = hosts.hosting(marks)
    mine = [(s.phase, s.start, s.end) for s in found.stretches if s.thread == 1]
    assert mine == [
        ("record", 0, 1),
        ("prepare", 1, 2),
        ("dispatch", 2, 3),
        ("wait", 3, 3.2),
        ("wait", 3.2, 3.4),
        ("wait", 3.4, 4),
        ("prepare", 4, 5),
        ("record", 5, 6),
    ]
    assert (found.start, found.end, found.steps, found.thread) == (0, 6, [5], 1)


def test_long_timelines_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "SPANS", 40)
    ops = ops_of(*((k * 0.01, k * 0.01 + 0.005, "dot.1" if k < 60 else "copy.3") for k in range(100)))
    trace = reading.Trace(ops, [Mark("begin", 1, 0, 0), Mark("end", 1, 1, 1)], {1: "python"})
    code = parse(HLO)
    monkeypatch.setattr(attribution, "_code", lambda program: code)
    monkeypatch.setattr(attribution, "_stale", lambda *found: False)
    watched = SimpleNamespace(program=SimpleNamespace(facts=activity.Graph("0a0b0c0d", 3, "train.py:11")), runs=1, compile_seconds=0.0)
    found = summary.summarize(trace, [watched])  # type: ignore[list-item]
    assert len(found.device_spans) <= 40
    assert sum(s.end - s.start for s in found.device_spans) == pytest.approx(0.5, rel=0.05)
    assert [s.module for s in found.device_spans if s.end < 0.59] == ["layers.*.mlp"] * len([s for s in found.device_spans if s.end < 0.59])
    assert found.device_spans[-1].module == results.COMPILER and found.executables[0].name == "0a0b0c0d"


# -- the picture -----------------------------------------------------------------------------------


def drawn(count: int) -> Profile:
    """A profile of three steps on so many devices."""
    host, spans, steps = [], [], []
    for k in range(3):
        host += [HostSpan("main", phase, k + n / 4, k + n / 4 + 0.25) for n, phase in enumerate(("record", "compile", "dispatch", "wait"))]
        steps.append(StepRow(k + 1, float(k), 1.0, 0.25, 0.0, 0.25, 0.25, 0.25, 0.5))
        for d in range(count):
            spans += [
                DeviceSpan(f"cpu:{d}", f"layers.{k}.mlp", "forward", k + 0.1, k + 0.3),
                DeviceSpan(f"cpu:{d}", f"layers.{k}.mlp", "backward", k + 0.3, k + 0.6),
                DeviceSpan(f"cpu:{d}", results.OUTSIDE, "optimizer", k + 0.6, k + 0.7),
            ]
    rows = [DeviceRow(f"cpu:{d}", 1.8, 1.8, 0.6, 9) for d in range(count)]
    made = {"steps": Table("", steps, results.STEP_COLUMNS), "devices": Table("", rows, results.DEVICE_COLUMNS)}
    return Profile(done=True, seconds=3.0, device_seconds=1.8 * count, host_spans=tuple(host), device_spans=tuple(spans), **made)  # type: ignore[arg-type]


@pytest.fixture
def colors() -> Iterator[Callable[[Any], set[str]]]:
    from matplotlib.colors import to_hex

    yield lambda axes: {to_hex(c) for bars in axes.collections for c in bars.get_facecolor()}


@pytest.mark.parametrize(("count", "lanes", "last"), [(1, 2, "cpu:0"), (32, 33, "cpu:31"), (64, 40, "26 more")])
def test_lanes(count: int, lanes: int, last: str, colors: Any) -> None:
    figure = timeline_picture(drawn(count))
    [axes] = figure.axes
    labels = [t.get_text() for t in axes.get_yticklabels()]
    assert (len(labels), labels[0], labels[-1]) == (lanes, "host", last)
    assert [line.get_xdata()[0] for line in axes.lines] == [1, 2, 3]
    assert {t.get_text() for t in axes.texts} == {"step 1", "step 2", "step 3"}
    names = [t.get_text() for t in figure.legends[0].get_texts()]
    assert names[:5] == ["host: record", "host: compile", "host: dispatch", "host: wait", "layers.*.mlp (forward, backward)"]
    assert "optimizer" in names and (count < 64 or names[-1].startswith("26 more: darker"))
    assert {timeline.GROUP_COLORS[0], timeline.SPECIAL_COLORS["optimizer"], timeline.HOST_COLORS["compile"]} <= colors(axes)
    extents = [p.get_extents() for bars in axes.collections for p in bars.get_paths()]
    assert max(e.x1 for e in extents) <= 3.0001 and axes.get_xlim() == (0, 3)
    assert len(axes.images) == (count == 64)


def test_a_long_compilation_is_drawn_short() -> None:
    """Ten seconds in the second of three steps of a second: the steps keep nearly all of the picture, and the ten seconds are written there."""
    plain = drawn(1)
    moved = replace(
        plain,
        seconds=13.0,
        host_spans=(HostSpan("main", "record", 0, 1), HostSpan("main", "compile", 1, 11), HostSpan("main", "record", 11, 13)),
        device_spans=(DeviceSpan("cpu:0", "a", "forward", 0.5, 0.9), DeviceSpan("cpu:0", "a", "forward", 12.5, 12.9)),
        steps=Table(
            "", [StepRow(k + 1, start, seconds, 0, 0, 0, 0, 0, 0) for k, (start, seconds) in enumerate([(0, 1), (1, 11), (12, 1)])], ()
        ),
    )
    [axes] = timeline_picture(moved).axes
    assert axes.get_xlim() == pytest.approx((0, 3.18)) and [line.get_xdata()[0] for line in axes.lines] == pytest.approx([1, 2.18, 3.18])
    assert axes.get_xlabel() == "time in s; compilations, 10 s, are drawn short" and "profile: 13 s" in axes.get_title("left")
    assert {t.get_text() for t in axes.texts} == {"10 s", "step 1", "step 2", "step 3"}
    assert moved.seconds == 13.0 and "compilations" not in timeline_picture(plain).axes[0].get_xlabel()


def test_colors_by_phase_and_files(measured: Profile, colors: Any, tmp_path: pathlib.Path) -> None:
    [axes] = timeline_picture(measured, tmp_path / "t.svg", by="phase").axes
    assert {timeline.PHASE_COLORS["forward"], timeline.PHASE_COLORS["backward"], timeline.PHASE_COLORS["optimizer"]} <= colors(axes)
    assert "<svg" in (tmp_path / "t.svg").read_text() and axes.get_xlabel() in ("time in ms", "time in us", "time in s")


def test_host_threads_beyond_four_are_counted() -> None:
    spans = tuple(HostSpan(f"python ({k})", "wait", 0, 1) for k in range(6))
    [axes] = timeline_picture(replace(drawn(1), host_spans=spans)).axes
    assert axes.get_xlabel() == "time in s; 2 more threads of the host are not shown"
    assert len(axes.get_yticklabels()) == 5


def test_groups_of_modules() -> None:
    def named(modules: list[str]) -> dict[str, str]:
        return timeline.groups([DeviceSpan("cpu:0", m, "forward", 0, 1 + k) for k, m in enumerate(modules)])

    deep = [f"model.layers.{k}.attn.{name}" for k in range(3) for name in "qkvo"]
    assert set(named(deep).values()) == {f"model.layers.*.attn.{name}" for name in "qkvo"}
    wide = [f"model.{name}.{part}" for name in "abc" for part in "uvwxyz"]
    assert set(named(wide).values()) == {"model.a", "model.b", "model.c"}
    many = named([f"m{k}" for k in range(12)])
    assert many["m0"] == timeline.OTHERS and many["m11"] == "m11" and len(set(many.values())) == 8
    assert named([results.OUTSIDE, results.COMPILER]) == {m: m for m in (results.OUTSIDE, results.COMPILER)}


def test_errors_of_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r'"module" or "phase", got \'op\''):
        timeline_picture(drawn(1), by="op")
    with pytest.raises(ValueError, match="draw it after the block"):
        timeline_picture(Profile())
    [axes] = timeline_picture(Profile(done=True, notes=("nothing ran on the device",))).axes
    assert "nothing ran" in axes.texts[0].get_text()
    with pytest.raises(ValueError, match=r"saved as .png, .svg or .pdf"):
        timeline_picture(drawn(1), "timeline.txt")
    figures._picture.cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pictures need matplotlib"):
        timeline_picture(drawn(1))
