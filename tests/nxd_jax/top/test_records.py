"""Reading what processes publish: the writer's words, torn files, folders, dead and reused process numbers."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest

from nxd_jax.top import records
from tests.nxd_jax.top.published import data, put, record
from torch_bridge.mesh import world
from torch_bridge.telemetry import activity as telemetry
from torch_bridge.telemetry import publisher as publishing


def test_what_is_published_is_understood(tmp_path: pathlib.Path) -> None:
    """Writer and reader are written apart (the reader must not import torch), so here they meet."""
    activity = telemetry.Activity()
    publisher = publishing.Publisher(activity, tmp_path)
    publisher.open()
    publisher.write()
    activity.world = world.World(2, (1,))
    activity.devices = telemetry.Devices((7,), 9, "gpu", 2, 0.1)
    activity.graph, activity.compiling = telemetry.Graph("aa", 1, "x.py:1", 5), (telemetry.Graph("bb", 2, ""), 3.0)
    assert records.Record.of(publisher.record()).hosted == (1,)
    ((file, first),) = records.read([tmp_path])
    publisher.write()
    ((again, second),) = records.read([tmp_path])
    assert file == again and records.FILE.fullmatch(file.name) and first.world_size == 1 and first.graph is None
    assert (second.world_size, second.hosted, second.memory, second.memory_limit) == (2, (1,), (7,), 9)
    assert second.graph == records.Graph("aa", 1, "x.py:1", 5, 0.0) and second.compiling == records.Graph("bb", 2, "", 0, 3.0)
    assert second.pid == os.getpid() and second.machine == records.machine() and records.life(second) == records.LIVE
    assert second.state in ("compiling", "running", "idle")
    assert records.VERSION == publishing.VERSION


@pytest.mark.parametrize("named", [True, False])
def test_writers_use_a_folder_that_readers_look_into(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(publishing.tempfile, "gettempdir", lambda: str(tmp_path))
    if named:
        monkeypatch.setenv("NXD_JAX_TOP_DIR", str(tmp_path / "named"))
        assert records.folders() == [publishing.usable_folder()] == [tmp_path / "named"]
        return
    monkeypatch.delenv("NXD_JAX_TOP_DIR", raising=False)
    assert publishing.usable_folder() in records.folders()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    shared = publishing.usable_folder()
    assert shared.parent == tmp_path and shared in records.folders()
    shared.chmod(0o777)
    assert shared not in records.folders(), "others may have put files there"
    shared.rmdir()
    assert shared not in records.folders()


def test_the_folder_on_the_command_line_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert records.folders("~/x", {"NXD_JAX_TOP_DIR": "/y"}) == [pathlib.Path.home() / "x"]
    assert records.folders(None, {"NXD_JAX_TOP_DIR": "/y"}) == [pathlib.Path("/y")]


GARBAGE: list[Any] = [
    "",
    "{",
    "[]",
    "null",
    "[" * 100_000,
    "\x00\xff",
    json.dumps(data(version=2)),
    json.dumps(data(pid="x")),
    json.dumps(data(world=4) | {"world": None}),
    json.dumps(data(hosted=[])),
    json.dumps(data(world=4, hosted=[4])),
    json.dumps(data(graph=[1])),
    json.dumps(data(utilization="NaN")),
    json.dumps(data(updated=1e999)),
    json.dumps({k: v for k, v in data().items() if k != "steps"}),
]


def test_garbage_is_passed_over(tmp_path: pathlib.Path) -> None:
    for k, text in enumerate(GARBAGE):
        (tmp_path / f"nxd-{k}-1.json").write_text(text, encoding="latin-1")
    (tmp_path / "nxd-99-1.json").mkdir()
    for name in ("nxd-5-1.tmp", "other.json", "nxd-x-1.json"):
        (tmp_path / name).write_text(json.dumps(data()))
    good = put(tmp_path, data())
    assert [file for file, _ in records.read([tmp_path, tmp_path / "nowhere", good])] == [good]


def test_no_text_reaches_the_terminal_that_it_would_obey() -> None:
    found = record(script="a\x1b[31m\nb", error="E\x07", utilization=7.0)
    assert found.script == "a?[31m?b" and found.error == "E?" and found.utilization == 1.0


def _stat(state: str, ticks: int) -> Any:
    return lambda pid: f"{pid} (a ) b) {state} " + " ".join(["0"] * 18 + [str(ticks)] + ["0"] * 30)


@pytest.mark.parametrize(
    ("state", "ticks", "life"),
    [("R", 77, records.LIVE), ("S", 77, records.LIVE), ("T", 77, records.STOPPED), ("Z", 77, records.DEAD), ("R", 78, records.DEAD)],
)
def test_life(state: str, ticks: int, life: str) -> None:
    assert records.life(record(), _stat(state, ticks)) == life


def test_life_elsewhere() -> None:
    assert records.life(record(machine="another pid:[1]"), _stat("R", 77)) == records.FAR
    assert records.life(record(ticks=None), _stat("S", 5)) == records.LIVE, "a writer without /proc"


def test_life_of_real_processes() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        ticks = publishing.start_ticks(child.pid)
        of = record(pid=child.pid, ticks=ticks)
        assert ticks is not None and records.life(of) == records.LIVE
        child.kill()
        deadline = time.monotonic() + 10
        while records.life(of) != records.DEAD and time.monotonic() < deadline:
            time.sleep(0.01)
        assert records.life(of) == records.DEAD, "a zombie is dead"
    finally:
        child.kill()
        child.communicate()
    assert records.life(of) == records.DEAD


def test_life_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(pid: int) -> str:
        raise PermissionError(pid)

    assert records.life(record(pid=os.getpid()), denied) == records.LIVE
    monkeypatch.setattr(records, "answers", lambda pid: False)
    assert records.life(record(), denied) == records.DEAD


def test_the_command_starts_without_torch_and_jax() -> None:
    code = "import nxd_jax.top.command, sys; print(sorted({'torch', 'jax', 'torch_bridge'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=pathlib.Path(__file__).parents[3], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
