"""What nxdt-train --example writes, and the loss curve that it draws."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from nxd_jax.training.config import loading
from nxd_jax.training.data import tokenizing
from nxd_jax.training.example import curves, files, running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files.write(tmp_path / "example")
    return tmp_path / "example"


def test_what_is_written(folder: Path) -> None:
    where = files.Files(folder)
    cfg = loading.load(where.config)
    plain = loading.plain(cfg)
    assert plain["data"]["train_dir"] == str(where.data / "train") and plain["model"]["model_config"] == str(where.model)
    assert "OUT/" not in where.config.read_text()
    tokenizer = tokenizing.load_tokenizer(where.tokenizer)
    assert len(tokenizer) == files.VOCABULARY
    for use in ("train", "val"):
        rows = datasets.load_from_disk(str(where.data / use))["input_ids"][:]
        text = "".join(file.read_text() for file in sorted((where.text / use).iterdir(), key=lambda file: file.stem))
        ids = [i for row in rows for i in row]
        assert text.startswith(tokenizer.decode(ids)) and len(text) - len(tokenizer.decode(ids)) < 10 * files.LENGTH
    assert len({plain["model"]["encoder_seq_length"], *map(len, rows)}) == 1
    with pytest.raises(FileExistsError, match="example holds something already: choose another folder with --out, or remove it"):
        files.write(folder)
    with pytest.raises(SystemExit, match="nxdt-train --example: .*holds something already"):
        running.run_example(folder)


def test_curves() -> None:
    values = {step: 8.0 - step for step in range(5)}
    assert curves.text(values, mark=2, height=5, width=9) == "\n".join(
        [
            "   8.000 |*   :",
            "         |  * :",
            "         |    *",
            "         |    : *",
            "   4.000 |    :   *",
            "         +---------",
            "          0       4",
        ]
    )
    assert curves.text({3: 1.0}, height=1, width=4).startswith("   1.000 |*")


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert curves.picture({0: 2.0, 1: 1.0}, tmp_path / "a.png", 1)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not curves.picture({0: 2.0}, tmp_path / "b.png")


def test_losses_of_two_runs(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for part, steps in (("run_0", range(4)), (".", range(2, 6))):
        with SummaryWriter(str(tmp_path / part)) as writer:
            for step in steps:
                writer.add_scalar("reduced_train_loss", step + (10 if part == "run_0" else 0), step, walltime=float(part == "."))
    assert curves.losses(tmp_path) == {0: 10.0, 1: 11.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0}
    assert curves.losses(tmp_path, "other") == {}


def test_a_checkpoint_that_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its temporary folders are renamed while somebody looks for the newest one."""
    complete = tmp_path / "run" / "checkpoints" / "a--step=4.ckpt"
    (complete / "optim").mkdir(parents=True)
    (complete / "done").touch()
    gone = tmp_path / "run" / "checkpoints" / "a--step=8.ckpt" / "optim.tmp"
    gone.mkdir(parents=True)
    scandir = os.scandir

    def renamed(path: Any = ".") -> Any:
        if os.fspath(path) in (str(gone), str(gone.parent)):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", renamed)
    assert running.newest(tmp_path) == 4


def test_the_newest_checkpoint(tmp_path: Path) -> None:
    assert running.newest(tmp_path) is None
    for name, done in (("a--step=5-consumed_samples=80.0.ckpt", True), ("a--step=10-x.ckpt", True), ("a--step=15-x.ckpt", False)):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        if done:
            (tmp_path / "checkpoints" / name / "done").touch()
    assert running.newest(tmp_path) == 10


def test_a_training_that_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(command: Any, reached: Any) -> tuple[int, bool]:
        return 3, False

    monkeypatch.setattr(running, "_until", fails)
    assert running.run_example(tmp_path / "out") == 3
    said = capfd.readouterr().out
    assert "nxdt-train --example: the training ended with status 3 before it could be stopped" in said
    assert f"1. nxdt-train {tmp_path}/out/hf_llama_tiny_config.yaml" in said
