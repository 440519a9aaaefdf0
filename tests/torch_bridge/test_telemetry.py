"""What a process tells `nxd-top`: the counters of the thread that runs programs, and the record that another thread publishes."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import pathlib
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
import torch
import torch_xla
from torch import nn

from torch_bridge.config.settings import SETTINGS
from torch_bridge.mesh import world
from torch_bridge.runtime import executor, session
from torch_bridge.telemetry import activity as telemetry
from torch_bridge.telemetry import publisher as publishing
from torch_bridge.telemetry.activity import Activity
from torch_bridge.telemetry.publisher import LOOK_EVERY, WRITE_EVERY, Publisher, steps_per_second

pytestmark = pytest.mark.usefixtures("clean_step")


@pytest.fixture
def publisher(tmp_path: pathlib.Path) -> Publisher:
    """One that publishes a fresh activity into tmp_path, without its thread."""
    made = Publisher(Activity(), tmp_path)
    made.open()
    return made


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Activity:
    """A fresh activity in the place of this process's, with publishing decided for and no thread, and nothing compiled yet."""
    made = Activity()
    monkeypatch.setattr(telemetry, "ACTIVITY", made)
    monkeypatch.setattr(publishing, "_decided", True)
    monkeypatch.setattr(publishing, "_publisher", Publisher(made))
    executor.clear_cache()
    return made


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before the first program."""
    monkeypatch.setattr(publishing, "_decided", False)
    monkeypatch.setattr(publishing, "_publisher", None)


class Output:
    """Stands for a result on the device."""

    def __init__(self, ready: bool = False, deleted: bool = False):
        self.ready, self.deleted = ready, deleted

    def is_deleted(self) -> bool:
        return self.deleted

    def is_ready(self) -> bool:
        if self.deleted:
            raise AssertionError("is_ready of a deleted array ends the process")
        return self.ready


# -- what the thread that runs programs notes ------------------------------------------------------


def _train(steps: int) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(5, 3).to("xla")).square().mean().backward()
        optimizer.step()
        torch_xla.sync()


def test_programs_and_steps_are_counted(noted: Activity) -> None:
    x = torch.ones(2, device="xla")
    for _ in range(3):
        x = x + 1
        torch_xla.sync()
        torch_xla.sync()  # nothing has run since: no step
    assert noted.programs == noted.steps == 3
    assert (x + 1).sum().item() == 10
    assert noted.programs == 4 and noted.steps == 3, "a value that is asked for ends no step"
    assert not noted.dispatching and noted.compiling is None
    assert time.time() - noted.ran_at < 60


def test_graphs_have_names(noted: Activity) -> None:
    def name(n: int, k: int) -> tuple[str, telemetry.Graph]:
        executor.clear_cache()
        y = torch.ones(n).to("xla").exp() * k
        torch_xla.sync()
        assert y is not None and noted.graph is not None
        return noted.graph.name, noted.graph

    first, graph = name(3, 2)
    assert graph.core_bytes >= 2 * 3 * 4
    assert name(3, 2)[0] == first and len(first) == 8
    assert first != name(4, 2)[0], "other shapes, another program"
    assert graph.ops >= 2 and graph.source.startswith("test_telemetry.py:")


def test_compiling_is_noted(noted: Activity, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    compile_ = executor.Program.compile
    monkeypatch.setattr(executor.Program, "compile", lambda self, args: (seen.append(noted.compiling), compile_(self, args)))
    y = torch.ones(7).to("xla").sin()
    torch_xla.sync()
    assert len(seen) == 1 and seen[0][0] is noted.graph and seen[0][0].name and time.time() - seen[0][1] < 60
    assert noted.compiling is None and noted.devices is not None and y is not None, "a new program measures the memory"


def test_a_failed_run_leaves_no_trace(noted: Activity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor.Program, "run", lambda self, args: 1 / 0)
    y = torch.ones(5).to("xla").cos()
    with pytest.raises(ZeroDivisionError):
        torch_xla.sync()
    assert not noted.dispatching and noted.compiling is None and noted.programs == 0 and y is not None


def test_what_cannot_be_described_is_compiled_all_the_same(
    noted: Activity, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(telemetry, "describe", lambda program: 1 / 0)
    monkeypatch.setattr(telemetry, "measure", lambda: 1 / 0)
    noted.asked = True
    with caplog.at_level(logging.DEBUG, "nxd_jax"):
        assert torch.ones(6).to("xla").neg().sum().item() == -6
    assert "will not know what this graph is: ZeroDivisionError" in caplog.text
    assert noted.graph is not None and noted.graph.name == "?"


def test_a_program_costs_one_call_and_touches_no_file(noted: Activity) -> None:
    """Counted, not timed: about 0.15 us a program (docs/reference/nxd_top.md)."""
    _train(2)
    calls: list[tuple[str, str]] = []

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        file = pathlib.Path(frame.f_code.co_filename).name
        if file in ("activity.py", "publisher.py"):
            calls.append((event, frame.f_code.co_name if event == "call" else getattr(arg, "__name__", "")))

    programs = noted.programs
    sys.setprofile(profile)
    try:
        _train(20)
    finally:
        sys.setprofile(None)
    ran = noted.programs - programs
    assert ran >= 20
    found = {call: calls.count(call) for call in calls if call[0] != "return"}
    assert found.pop(("call", "ran")) == ran and found.pop(("call", "step")) == 20
    assert {name for _, name in found} <= {"time", "monotonic", "proxy", "append"}, "nothing else runs in the hot path"


def test_donation_goes_on(noted: Activity, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference too many and updated weights would be copied."""
    monkeypatch.setattr(SETTINGS, "speculate", 0)
    _train(2)
    noted.asked = True
    _train(2)
    assert session.current().recent[-1].spec.ports.donated
    assert noted.devices is not None and sum(noted.devices.used) > 0


# -- whether the device is busy --------------------------------------------------------------------


def test_busy() -> None:
    activity, output = Activity(), Output()
    assert not activity.busy(), "nothing has run"
    activity.dispatching = True
    assert activity.busy()
    activity.ran(None, output)
    assert activity.busy() and activity.programs == 1
    output.ready = True
    assert not activity.busy()
    output.ready, output.deleted = False, True
    assert not activity.busy(), "nobody may ask a deleted array"
    output.deleted = False
    assert activity.busy()
    del output
    gc.collect()
    assert not activity.busy(), "nothing is kept alive"


def test_busy_with_arrays() -> None:
    activity, array = Activity(), jnp.ones(3) + 1
    array.block_until_ready()
    references = sys.getrefcount(array)
    activity.ran(None, array)
    assert not activity.busy() and sys.getrefcount(array) == references
    array.delete()
    assert not activity.busy()


def test_an_array_that_is_donated_in_this_moment() -> None:
    class Donated(Output):
        def is_ready(self) -> bool:
            raise RuntimeError("INVALID_ARGUMENT: Array has been deleted.")

    activity, output = Activity(), Donated()
    activity.ran(None, output)
    assert not activity.busy()


# -- memory ----------------------------------------------------------------------------------------


def test_memory_of_one_device() -> None:
    before = telemetry.measure()
    x = torch.ones(1000, device="xla") * 2
    torch_xla.sync()
    after = telemetry.measure()
    assert len(after.used) == 1 and after.used[0] - before.used[0] == 4000 and x is not None
    assert after.platform and after.count >= 1 and after.limit >= 0 and after.seconds < 10


def test_memory_of_several_ranks() -> None:
    world.configure(world.World(4))
    try:
        x = torch.ones(500, device="xla") * 2
        torch_xla.sync()
        found = telemetry.measure()
        assert len(found.used) == 4 and min(found.used) >= 2000 and x is not None
    finally:
        world.configure(None)


def test_memory_by_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerators keep count themselves."""

    def device(used: int, limit: int) -> Any:
        return SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_in_use": used, "bytes_limit": limit})

    monkeypatch.setattr(telemetry, "_of_ranks", lambda: [device(5, 100), device(7, 90)])
    found = telemetry.measure()
    assert (found.used, found.limit, found.platform) == ((5, 7), 90, "gpu")


# -- the record ------------------------------------------------------------------------------------


def test_the_record(publisher: Publisher, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_INSTANCE", "trn1.32xlarge")
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py", "--token", "secret"])
    activity, output = publisher.activity, Output(ready=True)
    of = world.World(4)
    of.axes = {"dp": 2, "tp": 2}
    activity.world = of
    activity.devices = telemetry.Devices((1, 2, 3, 4), 0, "cpu", 64, 0.001)
    activity.ran(telemetry.Graph("0123abcd", 12, "train.py:3", 99), output)
    activity.step()
    activity.compiling = telemetry.Graph("deadbeef", 7, ""), 1.5
    publisher.write()
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    found = json.loads(text)
    assert "secret" not in text and found["script"] == "train.py"
    assert found["pid"] == os.getpid() and found["ticks"] == publishing.start_ticks(os.getpid())
    assert found["world"] == {"size": 4, "hosted": [0, 1, 2, 3], "axes": {"dp": 2, "tp": 2}, "local_size": 4}
    assert found["devices"] == {"platform": "cpu", "count": 64, "limit": 0, "used": [1, 2, 3, 4]}
    assert found["environment"]["NXD_JAX_INSTANCE"] == "trn1.32xlarge"
    assert (found["programs"], found["steps"], found["steps_per_second"], found["state"]) == (1, 1, None, "compiling")
    assert found["graph"] == {"name": "0123abcd", "ops": 12, "source": "train.py:3", "core_bytes": 99, "ran_at": activity.ran_at}
    assert found["compiling"] == {"name": "deadbeef", "ops": 7, "source": "", "core_bytes": 0, "since": 1.5}
    assert time.time() - found["updated"] < 60 and found["error"] == ""


@pytest.mark.parametrize(
    ("argv", "name"), [(["/a/train.py", "x"], "train.py"), (["/a/b/__main__.py"], "b"), (["-c"], "-c"), ([""], "python"), ([], "python")]
)
def test_script_names(monkeypatch: pytest.MonkeyPatch, argv: list[str], name: str) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert publishing.script_name() == name


def test_jobs(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of one torchrun share a job; a process that hosts all ranks is one by itself, whatever a launcher has set."""
    for name, value in {"TORCHELASTIC_RUN_ID": "7", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    own = f"{os.getpid()}-{int(publisher.started * 1000)}"
    assert publisher.record()["job"] == own
    publisher.activity.world = world.World(2)
    assert publisher.record()["job"] == own
    publisher.activity.world = world.World(2, (1,))
    assert publisher.record()["job"] == "7@host:29500"


def test_utilization(publisher: Publisher) -> None:
    output = Output()
    publisher.activity.ran(None, output)
    start = publisher._looked
    for k in range(1, 101):  # busy for two seconds, then a second of nothing
        output.ready = k > 66
        publisher.look(start + k * 0.03)
    assert publisher.busy_seconds == pytest.approx(1.98)
    assert publisher.utilization(start + 3.0) == pytest.approx(0.66, abs=0.1)
    for k in range(1, 9):
        publisher.look(start + 3.0 + k * 0.5)
    assert publisher.utilization(start + 7.0) == 0, "an average of the last seconds only"


def test_a_long_pause_counts_as_idle(publisher: Publisher) -> None:
    start, output = publisher._looked, Output()
    publisher.look(start + 10)
    publisher.activity.ran(None, output)
    publisher.look(start + 10.5)
    assert publisher.busy_seconds == LOOK_EVERY


def test_states_and_pace(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    start = publisher._looked
    monkeypatch.setattr(publishing.time, "monotonic", lambda: now)
    now = start + 1
    assert publisher.record()["state"] == "running" and publisher._pause() < 2 * LOOK_EVERY
    assert not publisher._due(start + 0.4) and publisher._due(start + WRITE_EVERY)
    now = start + 20
    assert publisher.record()["state"] == "idle" and publisher._pause() == WRITE_EVERY
    publisher.write()
    assert not publisher._due(now + 4.9) and publisher._due(now + 5)
    publisher.activity.programs += 1
    publisher.look(now)
    assert publisher.record()["state"] == "running"


def test_memory_is_asked_for_rarely(publisher: Publisher) -> None:
    activity, start = publisher.activity, publisher._looked

    def asked(after: float) -> bool:
        activity.asked = False
        activity.programs += 1
        publisher.look(start + after)
        return activity.asked

    assert [asked(t) for t in (1.0, 2.1, 3.0, 4.2)] == [False, True, False, True]
    activity.devices = telemetry.Devices((1,), 0, "cpu", 1, seconds=0.05)
    assert [asked(t) for t in (7.0, 14.0, 14.3)] == [False, False, True], "it took long: every 10 s"


@pytest.mark.parametrize(
    ("times", "now", "rate"),
    [
        ([], 0.0, None),
        ([1.0], 2.0, None),
        ([1.0, 1.5, 2.0], 2.1, 2.0),
        ([1.0, 1.5, 2.0], 6.0, 0.25),  # no step for four seconds
        ([0.0, 30.0], 45.0, 0.0333),  # slow ones
        ([0.0, 0.1, 0.2, 90.0, 91.0, 92.0], 92.0, 1.0),
        ([3.0, 3.0], 4.0, None),
    ],
)
def test_steps_per_second(times: list[float], now: float, rate: float | None) -> None:
    assert steps_per_second(times, now) == rate


# -- starting, failing, ending ---------------------------------------------------------------------


def test_it_can_be_turned_off(undecided: None, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("NXD_JAX_TOP_DIR", str(tmp_path))
    monkeypatch.setenv("NXD_JAX_TOP", "0")
    monkeypatch.setattr(Publisher, "begin", lambda self: pytest.fail("a thread was started"))
    executor.clear_cache()
    assert torch.ones(3).to("xla").tan().shape == (3,)
    torch_xla.sync()
    assert not publishing.start() and not list(tmp_path.iterdir())


def test_forked_children_publish_nothing(undecided: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing.fork_guard, "_forked", True)
    assert not publishing.start()


@pytest.fixture
def ends() -> Iterator[Any]:
    """`ends(publisher)` lets its thread run until it stops by itself."""
    made: list[Publisher] = []

    def run(publisher: Publisher) -> None:
        made.append(publisher)
        publisher.begin()
        publisher._thread.join(timeout=20)
        assert not publisher._thread.is_alive() and publisher.ended

    yield run
    for publisher in made:
        publishing.atexit.unregister(publisher.close)


def test_no_folder_no_record(ends: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NXD_JAX_TOP_DIR", str(tmp_path / "file" / "folder"))
    with caplog.at_level(logging.DEBUG, "nxd_jax"):
        ends(Publisher(Activity()))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "nxd_jax"]
    assert "will not show this process: OSError" in line and "Not a directory" in line and "NXD_JAX_TOP_DIR names the folder" in line


def test_a_full_disk_ends_publishing(
    ends: Any, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(source: Any, target: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(publishing.os, "replace", full)
    with caplog.at_level(logging.DEBUG, "nxd_jax"):
        ends(publisher)
    assert "No space left on device" in caplog.text
    publisher.close()


def test_no_thread_no_record(publisher: Publisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with caplog.at_level(logging.DEBUG, "nxd_jax"):
        publisher.begin()
    assert publisher.ended and "can't start new thread" in caplog.text


def test_the_end(publisher: Publisher, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "_uncaught", lambda: None)
    publisher.write()
    monkeypatch.setattr(publisher, "_owner", os.getpid() + 1)  # as in a forked child
    publisher.close()
    assert len(list(tmp_path.iterdir())) == 1, "the record is the parent's"
    monkeypatch.setattr(publisher, "_owner", os.getpid())
    publisher.close()
    publisher.close()
    assert not list(tmp_path.iterdir())


def test_which_exceptions_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError("x")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert publishing._uncaught() is None, "a test that failed"
    monkeypatch.setattr(publishing, "SESSIONS", ())
    assert publishing._uncaught() is error
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert publishing._uncaught() is None, "a session goes on"
    monkeypatch.delattr(sys, "ps1")
    monkeypatch.setattr(sys, "last_value", KeyboardInterrupt())
    assert publishing._uncaught() is None


def test_an_uncaught_exception_stays_on_record(publisher: Publisher, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "_uncaught", lambda: ValueError("secret"))
    publisher.close()
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert json.loads(text)["error"] == "ValueError" and "secret" not in text


# -- folders ---------------------------------------------------------------------------------------


@pytest.fixture
def places(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An environment with a runtime folder and one for temporary files, both under tmp_path."""
    monkeypatch.delenv("NXD_JAX_TOP_DIR", raising=False)
    (tmp_path / "run").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(publishing.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    return tmp_path


def test_folders(places: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = places / "run" / "nxd_jax"
    assert publishing.usable_folder() == private and private.stat().st_mode & 0o777 == 0o700
    assert publishing.usable_folder() == private
    private.chmod(0o755)
    shared = places / "tmp" / f"nxd_jax-{os.getuid()}"
    assert publishing.usable_folder() == shared, "others could read or write the first"
    shared.chmod(0o777)
    with pytest.raises(OSError, match=f"{private} is not a folder of this user with mode 700.*; .*{shared} is not"):
        publishing.usable_folder()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(places / "nowhere"))
    shared.chmod(0o700)
    assert publishing.usable_folder() == shared
    monkeypatch.setenv("NXD_JAX_TOP_DIR", str(places / "a" / "b"))
    assert publishing.usable_folder() == places / "a" / "b"
    monkeypatch.setattr(publishing.os, "access", lambda path, mode: False)
    with pytest.raises(OSError, match="b cannot be written"):
        publishing.usable_folder()


def test_a_link_in_place_of_the_folder_is_not_followed(places: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    (places / "target").mkdir(mode=0o700)
    (places / "tmp" / f"nxd_jax-{os.getuid()}").symlink_to(places / "target")
    with pytest.raises(OSError, match="is not a folder of this user"):
        publishing.usable_folder()


def test_forgotten_records_are_removed(tmp_path: pathlib.Path) -> None:
    names = ["nxd-1-2.json", "nxd-1-2.tmp", "nxd-3-4.json", "mine.json", "nxd-1-2.txt"]
    for name in names:
        (tmp_path / name).write_text("")
        if name != "nxd-3-4.json":
            os.utime(tmp_path / name, (1.0, 1.0))
    publishing.remove_forgotten(tmp_path, time.time())
    assert {file.name for file in tmp_path.iterdir()} == {"nxd-3-4.json", "mine.json", "nxd-1-2.txt"}
