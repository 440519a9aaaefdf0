"""Which checkpoint a run goes on from: here, and on an S3 server."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_jax.training.utils import experiment_config, resuming
from tests.nxd_jax.training.utils.test_exp_manager import tag


def chosen(folder: object, log_dir: Path, **cfg: Any) -> str | None:
    return resuming.choose(experiment_config.read({"resume_if_exists": True, **cfg}), folder, log_dir)


def test_the_newest_complete_one_by_step(tmp_path: Path) -> None:
    """Not by time, nor by name; one that is not complete never."""
    for name in ("a--step=100-x.ckpt", "a--step=20-x.ckpt", "a--step=9-x.ckpt"):
        tag(tmp_path, name)
    tag(tmp_path, "a--step=300-x.ckpt", done=False)
    tag(tmp_path, "notes")
    os.utime(tmp_path / "a--step=9-x.ckpt" / "done")
    assert [t.step for t in resuming.complete_tags(tmp_path)] == [9, 20, 100]
    assert resuming.newest(tmp_path) == chosen(tmp_path, tmp_path) == f"{tmp_path}/a--step=100-x.ckpt"
    assert resuming.incomplete_tags(tmp_path) == ["a--step=300-x.ckpt"]


def test_names_without_a_step(tmp_path: Path) -> None:
    for name, step in (("best.ckpt", 7), ("last.ckpt", 30), ("odd.ckpt", None)):
        torch.save({"global_step": step} if step else [], tag(tmp_path, name) / "user_content.pt")
    (tag(tmp_path, "torn.ckpt") / "user_content.pt").write_bytes(b"no file of torch")
    assert [(t.name, t.step) for t in resuming.complete_tags(tmp_path)][-2:] == [("best.ckpt", 7), ("last.ckpt", 30)]


@pytest.mark.parametrize(("name", "step"), [("global_step=4", 4), ("a-step=5-step=6.ckpt", 6), ("substep=3", None), ("steps=3", None)])
def test_the_step_in_a_name(name: str, step: int | None) -> None:
    assert resuming.step_in(name) == step


def test_what_a_crash_while_replacing_left(tmp_path: Path) -> None:
    tag(tmp_path, "a-step=4.ckpt.old")
    tag(tmp_path, "a-step=4.ckpt.new")
    tag(tmp_path, "a-step=2.ckpt")
    assert resuming.newest(tmp_path) == f"{tmp_path}/a-step=4.ckpt"


def test_the_base_is_for_the_first_start_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base, own = tag(tmp_path / "other", "base.ckpt"), tmp_path / "own"
    assert chosen(own, tmp_path, resume_from_checkpoint=str(base)) == str(base)
    mine = tag(own, "a-step=1.ckpt")
    assert chosen(own, tmp_path, resume_from_checkpoint=str(base)) == str(mine)
    assert chosen(own, tmp_path, resume_from_checkpoint=str(base), resume_if_exists=False) == str(base)
    assert chosen(own, tmp_path, resume_if_exists=False) is None


def test_what_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "x" / "a" / "2" / "checkpoints"
    said = f"resume_if_exists: there is no complete checkpoint in {folder}. Set resume_ignore_no_checkpoint to True"
    with pytest.raises(FileNotFoundError, match=re.escape(said)):
        chosen(folder, folder.parent, exp_dir=str(tmp_path / "x"), name="a")
    tag(tmp_path / "x" / "a" / "1" / "checkpoints", "a-step=1.ckpt")
    tag(folder, "half.ckpt", done=False)
    assert chosen(folder, folder.parent, resume_ignore_no_checkpoint=True) is None
    assert "not complete, and so not gone on from: half.ckpt" in caplog.text
    assert (
        "training begins from scratch" in caplog.text
        and "has some of other versions: 1; to go on from one, set exp_manager.version" in caplog.text
    )
    tag(tmp_path / "other", "there.ckpt")
    with pytest.raises(
        FileNotFoundError, match="resume_from_checkpoint: there is no checkpoint .*gone.ckpt; complete ones beside it are there.ckpt"
    ):
        chosen(folder, folder.parent, resume_from_checkpoint=str(tmp_path / "other" / "gone.ckpt"))


def test_on_s3(s3: str, tmp_path: Path) -> None:
    from nxd_jax.checkpoint.storage import create_checkpoint_storage

    assert resuming.complete_tags(f"{s3}/none") == [] == resuming.incomplete_tags(f"{s3}/none")
    storage = create_checkpoint_storage(f"{s3}/run")
    for name, step in (("a-step=12.ckpt", 12), ("b.ckpt", 40), ("a-step=3.ckpt", 3)):
        folder = storage.begin(name)
        torch.save({"global_step": step}, folder / "user_content.pt")
        storage.commit(name, folder)
    storage.save_text("1", "a-step=99.ckpt/checkpoint")
    assert [(t.name, t.step) for t in resuming.complete_tags(f"{s3}/run")] == [("a-step=3.ckpt", 3), ("a-step=12.ckpt", 12), ("b.ckpt", 40)]
    assert resuming.incomplete_tags(f"{s3}/run") == ["a-step=99.ckpt"]
    assert chosen(f"{s3}/run", tmp_path) == f"{s3}/run/b.ckpt"
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint s3://.*/c.ckpt; complete ones beside it are .*b.ckpt"):
        chosen(f"{s3}/none", tmp_path, resume_from_checkpoint=f"{s3}/run/c.ckpt")
