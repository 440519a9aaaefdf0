"""`neuron_parallel_compile` runs commands as they are, says what graphs they met, and exits as told; runs after it compile nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nxd_jax.parallel_compile import Graphs, cache, command
from torch_bridge.telemetry import compile_log

ROOT = Path(__file__).resolve().parents[3]

MEETS = """
import json, os, pathlib, sys
assert os.environ["NEURON_EXTRACT_GRAPHS_ONLY"] == "1"
command, folder = os.environ["NXD_JAX_COLLECT"].split(":")
file = (pathlib.Path(folder) / "1.jsonl").open("a")
for event in json.loads(sys.argv[1]):
    file.write(json.dumps(event) + "\\n")
file.close()
sys.exit(int(sys.argv[2]))
"""
"""Stands for a script: tells of graphs as `torch_bridge.telemetry.compile_log` does, and exits."""

FIRST = {"graph": "1f0c2a44", "number": 0, "ops": 61, "source": "train.py:88"}
SECOND = {"graph": "1f0c2a44", "number": 1, "ops": 61, "source": ""}
DONE = [
    {"event": "found", **FIRST},
    {"event": "compiled", **FIRST, "seconds": 1.25, "cached": False},
    {"event": "found", **SECOND},
    {"event": "compiled", **SECOND, "seconds": 0.5, "cached": True},
]
FAILED = {"event": "failed", **SECOND, "seconds": 0.5, "error": "XlaRuntimeError: no"}

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command on a stand-in that tells of `events` and ends with `status`; its exit status and what it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    (tmp_path / "train.py").write_text(MEETS)

    def start(events: list[dict], status: int = 0, *options: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            command.main([*options, "train.py", json.dumps(events), str(status)])
        return int(ended.value.code or 0), capfd.readouterr().err

    return start


def test_summary(run: Run) -> None:
    status, said = run(DONE)
    assert status == 0
    assert "neuron_parallel_compile: compiling the graphs of: " in said
    assert "graph 1f0c2a44 (61 ops, up to train.py:88) compiled in 1.2 s" in said
    assert "graph 1f0c2a44-1 (61 ops) was in the cache" in said
    for line in ("Total graphs: 2", "Total successful compilations: 2 (1 were in the cache)", "Total failed compilations: 0"):
        assert f"{line}\n" in said


@pytest.mark.parametrize("options", [["--dump-results"], []])
def test_results_as_json(run: Run, tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if not options:
        monkeypatch.setenv("NEURON_PARALLEL_COMPILE_DUMP_RESULTS", "1")
    assert run(DONE, 0, *options)[0] == 0
    report = json.loads((tmp_path / "neuron_parallel_compile_report.json").read_text())
    assert report["compilation_summary"] == {"true": 2}
    assert report["compilation_report"]["1f0c2a44"]["status"] is True and report["compilation_report"]["1f0c2a44"]["compile_time"] == 1.25
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT.*", report["start_time"]) and report["compilation_time"] > 0


def test_a_graph_that_cannot_be_compiled(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [*DONE[:3], FAILED]
    status, said = run(events, 1)
    assert status == 1 and "graph 1f0c2a44-1 (61 ops) FAILED after 0.5 s: XlaRuntimeError: no" in said
    assert "Total failed compilations: 1\n" in said
    monkeypatch.setenv("NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE", "1")
    assert run(events, 1)[0] == 1  # the script's error does not count, the graph's does


def test_exit_status_of_the_script(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    status, said = run(DONE, 3)
    assert status == 3 and "the script ended with exit status 3; the graphs that it met before are compiled" in said
    monkeypatch.setenv("NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE", "1")
    status, said = run(DONE, 3)
    assert status == 0 and "exit status 3, which does not count (NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE=1)" in said


def test_a_switch_that_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_PARALLEL_COMPILE_DUMP_RESULTS", "maybe")
    with pytest.raises(SystemExit, match="neuron_parallel_compile: NEURON_PARALLEL_COMPILE_DUMP_RESULTS='maybe': must be 0 or 1"):
        command.main(["train.py"])


def test_no_graphs(run: Run) -> None:
    status, said = run([])
    assert status == 0 and "no graph was found: does the script use device 'xla', and does it call torch_xla.sync()" in said


def test_collect(run: Run) -> None:
    status, said = run([DONE[0], DONE[2]], 0, "--command", "collect")
    assert status == 0 and "Total graphs found and not compiled: 2" in said and "collecting the graphs of" in said


def test_several_processes_and_half_a_line(tmp_path: Path) -> None:
    graphs = Graphs(tmp_path)
    for name in ("1", "2"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(e) + "\n" for e in DONE))
    with (tmp_path / "2.jsonl").open("a") as file:
        file.write('{"event": "fo')
        file.flush()
        assert [e for e, _ in graphs.read()] == ["found", "compiled", "found", "cached"]
        file.write(json.dumps({"event": "found", **FIRST, "graph": "00000000"})[len('{"event": "fo') :] + "\n")
    assert [(e, g.name) for e, g in graphs.read()] == [("found", "00000000")]
    assert graphs.count() == 3 and graphs.count("compiled", "cached") == 2


@pytest.mark.parametrize(
    ("run_command", "text"),
    [
        ([], r"say what to run: neuron_parallel_compile \[--command compile\] torchrun"),
        (["nowhere.py"], "no such script: nowhere.py"),
        (["no-such-program", "x.py"], r"no such command: no-such-program; give torchrun, nxd-run, python3 or a script that ends in \.py"),
    ],
)
def test_what_cannot_be_run(run_command: list[str], text: str) -> None:
    with pytest.raises(SystemExit, match=text):
        command.launch(run_command)


def test_launchers_of_this_environment() -> None:
    assert command.launch(["--", "python3", "-m", "x"]) == [str(Path(sys.executable).parent / "python3"), "-m", "x"]
    assert command.launch(["torchrun", "x.py"])[1:] == ["x.py"]


def test_the_folder() -> None:
    assert cache.folder({}) == Path("/var/tmp/neuron-compile-cache") and not cache.is_chosen({})
    assert cache.folder({"NEURON_COMPILE_CACHE_URL": "file:///tmp/a"}) == Path("/tmp/a")
    named = {"NEURON_COMPILE_CACHE_URL": "/tmp/a", "NEURON_CC_FLAGS": "--auto-cast=none --cache_dir=/tmp/b"}
    assert cache.folder(named) == Path("/tmp/b") and cache.is_chosen(named)
    with pytest.raises(SystemExit, match="s3://x: only folders can keep compiled programs; set NEURON_COMPILE_CACHE_URL to one"):
        cache.folder({"NEURON_COMPILE_CACHE_URL": "s3://x"})
    with pytest.raises(SystemExit, match="NEURON_CC_FLAGS has --no_cache, so nothing would be kept; leave it out"):
        cache.folder({"NEURON_CC_FLAGS": "--no_cache"})


def test_unnamed_folder_is_told(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEURON_COMPILE_CACHE_URL")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(cache, "DEFAULT", str(tmp_path / "default"))
    assert f"set NEURON_COMPILE_CACHE_URL={tmp_path}/default for the runs that are to use them" in run(DONE)[1]


def test_clear_locks_and_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path))
    (tmp_path / "executables").mkdir()
    for name in (".lockfile", "jit_f-1-cache", "notes.txt", "executables/1.executable", "executables/.1.part", "executables/.2.part"):
        (tmp_path / name).touch()
    old = time.time() - 2 * cache.OLD
    os.utime(tmp_path / "executables" / ".1.part", (old, old))
    command.main(["--command", "clear-locks"])
    assert f"removed 2 locks from {tmp_path}" in capfd.readouterr().err
    assert (tmp_path / "executables" / ".2.part").exists() and (tmp_path / "jit_f-1-cache").exists()
    command.main(["--command", "clean"])
    assert f"removed 3 files of compiled programs from {tmp_path}" in capfd.readouterr().err
    assert [f.name for f in tmp_path.iterdir() if f.is_file()] == ["notes.txt"]


def test_setting_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_COLLECT", "walk:/tmp")
    with pytest.raises(
        ValueError, match="NXD_JAX_COLLECT='walk:/tmp': must be compile:<folder> or collect:<folder>; `neuron_parallel_compile` sets it"
    ):
        compile_log.told()


SCRIPT = """
import torch, torch_xla
import torch_xla.core.xla_model as xm
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    x = torch.randn(4, 8).to("xla") + xm.get_ordinal()
    loss = model(x).square().mean()
    loss.backward()
    xm.optimizer_step(optimizer)
    optimizer.zero_grad()
    torch_xla.sync()
print("loss", loss.item())
"""


def test_the_run_after_it_compiles_nothing(tmp_path: Path) -> None:
    """Two ranks in one process, first by the command and then for real."""
    (tmp_path / "train.py").write_text(SCRIPT)
    variables = os.environ | {"NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache"), "JAX_NUM_CPU_DEVICES": "2"}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")])
    launcher = ["-m", "nxd_jax.run", "--nproc_per_node", "2", "train.py"]

    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done

    compiled = start("-m", "nxd_jax.parallel_compile", "python3", *launcher)
    assert "loss 0.0" in compiled.stdout
    graphs = int(re.findall(r"Total graphs: (\d+)", compiled.stderr)[0])
    assert graphs >= 1 and f"Total successful compilations: {graphs} (0 were in the cache)" in compiled.stderr

    real = start(str(ROOT / "tests" / "counted.py"), *launcher)
    lines = real.stdout.splitlines()
    assert float(lines[0].split()[1]) > 0
    counters = json.loads(lines[-1])
    assert counters["UncachedCompile"] == graphs and counters["PersistentCacheHit"] >= graphs and counters["PersistentCacheMiss"] == 0
