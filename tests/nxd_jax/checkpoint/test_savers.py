"""Two jobs that save into one folder, and a disk that is full: one sentence each, and nothing of another job's is touched."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import numpy as np
import pytest
import torch

from nxd_jax.checkpoint import leftovers, orbax_files, savers, tags


@pytest.fixture
def model(nxd: Any) -> torch.nn.Module:
    nxd(1)
    return torch.nn.Linear(4, 3).to("xla")


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Another process that lives."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def begun_by(process: subprocess.Popen[bytes], folder: Path) -> Path:
    """What that process has begun to save."""
    folder.mkdir(parents=True)
    (folder / savers.BEGUN).write_text(f"1 {savers._machine()} {process.pid} {savers._started(process.pid)} 1")
    return folder


def test_a_tag_that_another_process_is_saving(model: Any, other: Any, tmp_path: Path) -> None:
    folder = begun_by(other, tmp_path / "t")
    with pytest.raises(FileExistsError) as found:
        nxd.save_checkpoint(tmp_path, "t", model)
    assert str(found.value) == (
        f"the checkpoint t in {tmp_path} is not only this job's: process {other.pid} is saving it now. Give each job a folder, or a tag, of its own"
    )
    assert folder.is_dir()
    other.kill()  # not waited for: a process that is dead and not collected counts as gone
    while savers._started(other.pid) is not None:
        time.sleep(0.01)
    nxd.save_checkpoint(tmp_path, "t", model)
    assert nxd.has_checkpoint(tmp_path)


def test_retention_leaves_what_another_process_is_saving(model: Any, other: Any, tmp_path: Path) -> None:
    busy = begun_by(other, tmp_path / "a")
    nxd.save_checkpoint(tmp_path, "b", model, num_kept_ckpts=1)
    assert busy.is_dir()
    other.kill()
    other.wait()
    nxd.save_checkpoint(tmp_path, "c", model, num_kept_ckpts=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("how", ["begun again", "removed", "begun again, and writing fails"])
def test_a_tag_that_was_begun_again(how: str, background: bool, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process of another machine, about which nothing is known."""
    save = orbax_files.save

    def meanwhile(folder: Path, *args: Any) -> None:
        save(folder, *args)
        (tmp_path / "t" / savers.BEGUN).unlink()
        if how != "removed":
            (tmp_path / "t" / savers.BEGUN).write_text("1 elsewhere - 17 4711 1")
        if "fails" in how:
            raise FileNotFoundError(folder)

    monkeypatch.setattr(orbax_files, "save", meanwhile)
    with pytest.raises(
        FileExistsError, match=r"another process began it again, or removed it, while this one was writing\. Give each job a folder"
    ):
        nxd.save_checkpoint(tmp_path, "t", model, async_save=background)
        nxd.finalize_checkpoint()
    assert (tmp_path / "t/model").is_dir() and not nxd.has_checkpoint(tmp_path)


def test_a_full_disk(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As Orbax has it: the system's number is in the text alone, and its threads log tracebacks of their own."""

    def full(*_: Any) -> None:
        logging.getLogger("absl").error("[process=0] _SignalingThread.run() raised an exception: RESOURCE_EXHAUSTED")
        logging.getLogger("absl").error("something else")
        try:
            raise ValueError(
                "RESOURCE_EXHAUSTED: Error writing: Failed to write 891405 bytes to file 7: No space left on device [os_error_code='28']"
            )
        except ValueError as error:
            raise RuntimeError("a thread failed") from error

    nxd.save_checkpoint(tmp_path, "good", model)
    monkeypatch.setattr(orbax_files, "save", full)
    with pytest.raises(OSError) as found:
        nxd.save_checkpoint(tmp_path, "bad", model)
    assert found.value.errno == 28 and found.value.__suppress_context__
    text = str(found.value)
    assert (
        "No space left on device: the checkpoint bad of 0.0 MB was not saved to" in text
        and "MB are free; earlier checkpoints are as they were" in text
    )
    assert "num_kept_ckpts" in text and "\n" not in text
    assert [r.getMessage() for r in caplog.records if r.name == "absl"] == ["something else"]
    assert [p.name for p in tmp_path.iterdir()] == ["good"]


def test_files_may_not_be_so_large(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise ValueError("OUT_OF_RANGE: Failed writing: Failed to write 1657 bytes to file 7: File too large [os_error_code='27']")

    nxd.save_checkpoint(tmp_path, "good", model)
    monkeypatch.setattr(orbax_files, "save", refused)
    with pytest.raises(
        OSError, match=r"File too large: the checkpoint bad of 0\.0 MB was not saved to .*Raise the limit of the shell \(ulimit -f"
    ):
        nxd.save_checkpoint(tmp_path, "bad", model)
    assert [p.name for p in tmp_path.iterdir()] == ["good"]


def test_other_errors_stay_what_they_are(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(orbax_files, "save", broken)
    with pytest.raises(KeyError, match="broken"):
        nxd.save_checkpoint(tmp_path, "bad", model)
    assert list(tmp_path.iterdir()) == []


def test_marks_that_say_nothing(tmp_path: Path) -> None:
    """Of earlier releases and of NxD itself; unreadable ones."""
    for text in (b"1", b"", b"\xff\xfe", b"1 a b c"):
        (tmp_path / "t").mkdir(exist_ok=True)
        (tmp_path / "t" / savers.BEGUN).write_bytes(text)
        assert savers.owner(tmp_path / "t") is None
        folder = tags.begin(tmp_path, "t")
        assert savers.owner(folder) is None and not savers.lost(folder)


AT_ITS_END = """
import resource, sys
import neuronx_distributed as nxd
import torch
import torch_xla

model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(40)]).to("xla")
torch_xla.sync()
nxd.save_checkpoint(sys.argv[1], "good", model)
resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
nxd.save_checkpoint(sys.argv[1], "bad", model, async_save=True)
"""


def test_the_last_save_in_the_background_fails(tmp_path: Path) -> None:
    """The process ends with an error. Orbax was writing forty arrays: one of them tells what is wrong."""
    ran = subprocess.run([sys.executable, "-c", AT_ITS_END, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 120
    first, second = ran.stderr.splitlines()[-2:]
    assert "a checkpoint could not be saved: [Errno 27] File too large: the checkpoint bad of" in first
    assert (
        "the process ends with status 120, a save in the background failed: OSError: [Errno 27] File too large: the checkpoint bad"
        in second
    )
    assert "Event loop" not in ran.stderr and "never retrieved" not in ran.stderr and "Traceback" not in ran.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["good"]


def test_what_was_being_written_ends_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As Orbax leaves it: an array is still being written when its event loop is closed."""
    import tensorstore

    told: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: told.append(str(found.exc_value)))
    spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/array", "dtype": "float32"}
    array = tensorstore.open(spec, create=True, shape=[2000, 2000]).result()

    async def fail() -> None:
        other = asyncio.get_running_loop().create_future()
        other.set_exception(KeyError("nobody asks"))
        raise OSError("no room")

    async def write() -> None:
        await array.write(np.ones((2000, 2000), "float32"))

    def work() -> None:
        loop = asyncio.new_event_loop()
        tasks = [loop.create_task(write()), loop.create_task(fail())]
        try:
            loop.run_until_complete(tasks[1])
        finally:
            loop.close()

    class Other:
        def __del__(self) -> None:
            raise ValueError("of the user")

    with leftovers.quiet():
        with pytest.raises(OSError, match="no room") as found:
            work()
        Other()
        leftovers.settle([found.value])
    assert told == ["of the user"]
    assert (array.read().result() == 1).all()
    assert "never retrieved" not in caplog.text and "destroyed" not in caplog.text
