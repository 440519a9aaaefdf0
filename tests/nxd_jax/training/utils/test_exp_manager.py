"""`exp_manager`: folders, logs, loggers and callbacks. No model is trained here."""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, Timer
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from nxd_jax.training.lightning_modules.nlp_overrides import NLPTrainer
from nxd_jax.training.utils.callbacks import PreemptionCallback, TimingCallback
from nxd_jax.training.utils.ema import EMA
from nxd_jax.training.utils.exp_manager import NeMoModelCheckpoint, StatelessTimer, exp_manager

pytestmark = pytest.mark.usefixtures("ranks")

QUIET = {"create_tensorboard_logger": False}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NEMO_EXPM_VERSION", raising=False)


def trainer(**options: Any) -> NLPTrainer:
    return NLPTrainer(devices=1, enable_progress_bar=False, **options)


def tag(folder: Path, name: str, done: bool = True) -> Path:
    """A checkpoint as far as a listing sees it."""
    (folder / name).mkdir(parents=True)
    (folder / name / "checkpoint").touch()
    if done:
        (folder / name / "done").touch()
    return folder / name


# -- folders -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cfg", "variable", "place"),
    [
        ({}, None, r"nemo_experiments/default/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d"),
        ({"name": "a", "version": "v1"}, "other", "nemo_experiments/a/v1"),
        ({"name": "a"}, "job7", "nemo_experiments/a/job7"),
        ({"exp_dir": "x", "name": "a", "use_datetime_version": False}, None, "x/a/version_0"),
        ({"exp_dir": "x", "resume_if_exists": True, "resume_ignore_no_checkpoint": True}, None, "x/default"),
        ({"explicit_log_dir": "e", "name": "a", "version": "v1"}, "job7", "e"),
    ],
)
def test_the_folder(tmp_path: Path, cfg: dict[str, Any], variable: str | None, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if variable:
        monkeypatch.setenv("NEMO_EXPM_VERSION", variable)
    made = trainer()
    found = exp_manager(made, {**QUIET, **cfg})
    assert found is not None and re.fullmatch(place, os.path.relpath(found, tmp_path)) and found.is_dir()
    assert str(made.default_root_dir) == str(found)
    callback = made.checkpoint_callback
    assert isinstance(callback, NeMoModelCheckpoint) and Path(str(callback.dirpath)) == found.absolute() / "checkpoints"


def test_each_launch_of_the_shell_script_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """(q) train_setup.sh exports the time as NEMO_EXPM_VERSION, and in the original each launch begins from scratch."""
    cfg = {**QUIET, "name": "a", "resume_if_exists": True, "resume_ignore_no_checkpoint": True}

    def launched(when: str, **more: Any) -> tuple[str, str | None]:
        monkeypatch.setenv("NEMO_EXPM_VERSION", when)
        made = trainer()
        found = exp_manager(made, {**cfg, **more})
        assert found is not None
        return found.name, made.ckpt_path and Path(made.ckpt_path).name

    first, second, third = "2026-11-01_10-00-00", "2026-11-02_10-00-00", "2026-11-03_10-00-00"
    assert launched(first) == (first, None)
    tag(tmp_path / "nemo_experiments/a" / first / "checkpoints", "a--step=3.ckpt")
    tag(tmp_path / "nemo_experiments/a/other/checkpoints", "a--step=9.ckpt")
    tag(tmp_path / "nemo_experiments/a" / "2026-11-02_09-00-00" / "checkpoints", "a--step=5.ckpt", done=False)
    assert launched(second) == (first, "a--step=3.ckpt")
    assert f"going on with {first}, the newest launch" in caplog.text
    assert launched(second, version=second) == (second, None)
    tag(tmp_path / "nemo_experiments/a" / second / "checkpoints", "a--step=4.ckpt")
    assert launched(second) == (second, "a--step=4.ckpt")
    assert launched(third, resume_if_exists=False) == (third, None)
    assert launched("job7") == ("job7", None)


def test_numbers_as_versions(tmp_path: Path) -> None:
    cfg = {"exp_dir": "x", "name": "a", "use_datetime_version": False}
    assert [exp_manager(trainer(), cfg).name for _ in range(2)] == ["version_0", "version_1"]  # type: ignore[union-attr]


def test_a_trainer_with_a_logger_says_where(tmp_path: Path) -> None:
    made = trainer(logger=CSVLogger("logs", "mine", "three"))
    assert exp_manager(made, QUIET) == Path("logs/mine/three") and len(made.loggers) == 1
    with pytest.raises(
        MisconfigurationException, match="the Trainer has a CSVLogger, which says where to write, and exp_manager has exp_dir, version too"
    ):
        exp_manager(made, {**QUIET, "exp_dir": "x", "version": "1"})
    with pytest.raises(MisconfigurationException, match="explicit_log_dir=e and a Trainer with a logger of its own"):
        exp_manager(made, {**QUIET, "explicit_log_dir": "e"})
    with pytest.raises(
        MisconfigurationException, match=r"has a logger \(CSVLogger\) and exp_manager.create_tensorboard_logger would make another"
    ):
        exp_manager(made, {})


def test_old_files_move_and_files_are_copied(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("hello")
    cfg = {"exp_dir": "x", "name": "a", "resume_if_exists": True, "resume_ignore_no_checkpoint": True, "files_to_copy": ["note.txt"]}
    folder = exp_manager(trainer(), cfg)
    assert folder is not None
    files = {"cmd-args.log", "note.txt", "lightning_logs.txt", "nemo_error_log.txt", "nemo_log_globalrank-0_localrank-0.txt"}
    assert {p.name for p in folder.iterdir()} == files
    assert (folder / "cmd-args.log").read_text() == " ".join(sys.argv)
    exp_manager(trainer(), cfg)
    assert not list(folder.glob("run_*"))  # nothing was trained
    tag(folder / "checkpoints", "a--step=3.ckpt")
    for runs in (["run_0"], ["run_0", "run_1"]):
        exp_manager(trainer(), cfg)
        assert sorted(p.name for p in folder.glob("run_*")) == runs
    assert {p.name for p in (folder / "run_1").iterdir()} == files == {p.name for p in folder.iterdir() if p.is_file()}
    with pytest.raises(FileNotFoundError, match="exp_manager.files_to_copy: there is no file nothing.txt, nor.txt"):
        exp_manager(trainer(), {**cfg, "files_to_copy": ["nothing.txt", "note.txt", "nor.txt"]})


# -- logs and loggers --------------------------------------------------------------------------------


def test_what_log_files_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = exp_manager(trainer(), {**QUIET, "explicit_log_dir": "e"})
    assert folder is not None
    ours, theirs = logging.getLogger("nxd_jax"), logging.getLogger("pytorch_lightning")
    ours.info("one")
    ours.warning("two")
    theirs.warning("three")
    other = exp_manager(trainer(), {**QUIET, "explicit_log_dir": "f"})
    ours.warning("four")
    texts = {
        name: (folder / name).read_text() for name in ("nemo_log_globalrank-0_localrank-0.txt", "nemo_error_log.txt", "lightning_logs.txt")
    }
    found = [[word for word in ("one", "two", "three", "four") if word in text] for text in texts.values()]
    assert found == [["one", "two"], ["two", "three"], ["three"]]
    assert other is not None and "four" in (other / "nemo_error_log.txt").read_text()


def test_both_kinds_of_rank_0() -> None:
    with pytest.raises(ValueError, match="log_local_rank_0_only and log_global_rank_0_only are both True: set one of them, or neither"):
        exp_manager(trainer(), {**QUIET, "log_local_rank_0_only": True, "log_global_rank_0_only": True})


def test_tensorboard(tmp_path: Path) -> None:
    made = trainer()
    folder = exp_manager(made, {"exp_dir": "x", "name": "a", "version": "b", "summary_writer_kwargs": {"flush_secs": 7}})
    assert folder is not None and Path(made.loggers[0].log_dir) == folder  # type: ignore[arg-type]
    made = trainer()
    assert exp_manager(made, {"explicit_log_dir": "e"}) == Path("e") and Path(made.loggers[0].log_dir) == Path("e")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="summary_writer_kwargs must not have log_dir: exp_dir, name and version"):
        exp_manager(trainer(), {"summary_writer_kwargs": {"log_dir": "x"}})


def test_loggers_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from nxd_jax.training.utils import experiment_logs

    monkeypatch.setattr(experiment_logs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError, match="create_mlflow_logger needs the package mlflow: pip install mlflow, or set create_mlflow_logger to False"
    ):
        exp_manager(trainer(), {"create_mlflow_logger": True})
    with pytest.raises(ValueError, match=r"create_wandb_logger needs wandb_logger_kwargs.project"):
        exp_manager(trainer(), {"create_wandb_logger": True, "wandb_logger_kwargs": {"name": "a"}})
    with pytest.raises(ModuleNotFoundError, match="create_wandb_logger needs the package wandb: pip install wandb"):
        exp_manager(trainer(), {"create_wandb_logger": True, "wandb_logger_kwargs": {"name": "a", "project": "b"}})


# -- callbacks ---------------------------------------------------------------------------------------


def kinds(made: NLPTrainer) -> list[type]:
    return [type(callback) for callback in made.callbacks]  # type: ignore[attr-defined]


def test_callbacks() -> None:
    made = trainer(max_time="00:00:10:00")
    cfg = {
        **QUIET,
        "create_early_stopping_callback": True,
        "early_stopping_callback_params": {"patience": 3},
        "ema": {"enable": True, "decay": 0.5, "every_n_steps": 2, "validate_original_weights": True},
        "step_timing_kwargs": {"buffer_size": 4},
    }
    exp_manager(made, cfg)
    assert {TimingCallback, StatelessTimer, PreemptionCallback, EarlyStopping, EMA, NeMoModelCheckpoint} <= set(kinds(made))
    assert Timer not in kinds(made) and kinds(made)[-1] is NeMoModelCheckpoint
    by_kind: dict[type, Any] = {type(callback): callback for callback in made.callbacks}  # type: ignore[attr-defined]
    assert by_kind[StatelessTimer]._duration == 600 and by_kind[EarlyStopping].patience == 3 and by_kind[TimingCallback].buffer_size == 4
    ema = by_kind[EMA]
    assert (ema.decay, ema.every_n_steps, ema.validate_original_weights) == (0.5, 2, True)


def test_a_limit_for_each_run_comes_first() -> None:
    made = trainer(max_time="00:00:10:00")
    off = {"create_preemption_callback": False, "create_checkpoint_callback": False, "log_step_timing": False}
    exp_manager(made, {**QUIET, **off, "max_time_per_run": "00:00:00:30"})
    timers = [callback for callback in made.callbacks if isinstance(callback, Timer)]  # type: ignore[attr-defined]
    assert [type(t) for t in timers] == [StatelessTimer] and timers[0]._duration == 30
    assert not {TimingCallback, PreemptionCallback, NeMoModelCheckpoint, EarlyStopping, EMA} & set(kinds(made))


@pytest.mark.parametrize(
    ("cfg", "said"),
    [
        ({"ema": {"enable": True, "decay": 2}}, "exp_manager.ema.decay must be between 0 and 1, got 2"),
        ({"ema": {"enable": True, "every_n_steps": 0}}, "exp_manager.ema.every_n_steps must be at least 1, got 0"),
        ({"step_timing_kwargs": {"reduction": "max"}}, "exp_manager.step_timing_kwargs.reduction must be 'mean' or 'sum', got 'max'"),
        ({"checkpoint_callback_params": {"save_nemo_on_train_end": True}}, "a .nemo file is written by NeMo: set it to False"),
        ({"checkpoint_callback_params": {"every_n_train_steps": 2, "every_n_epochs": 1}}, "should be mutually exclusive"),
    ],
)
def test_values_that_do_not_fit(cfg: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, MisconfigurationException), match=said):
        exp_manager(trainer(), {**QUIET, **cfg})


def test_a_trainer_with_a_checkpoint_callback() -> None:
    made = trainer(enable_checkpointing=True, callbacks=[ModelCheckpoint()])
    with pytest.raises(
        MisconfigurationException, match="the Trainer has a ModelCheckpoint, and exp_manager.create_checkpoint_callback would make another"
    ):
        exp_manager(made, QUIET)


def test_names_of_checkpoints() -> None:
    made = trainer()
    exp_manager(made, {**QUIET, "name": "a", "checkpoint_callback_params": {"filepath": "/tmp/deep/x-{step}"}})
    callback: Any = made.checkpoint_callback
    assert callback.dirpath == "/tmp/deep" and callback.filename == "x-{step}" and callback.CHECKPOINT_NAME_LAST == "x-{step}-last"
    made = trainer()
    exp_manager(made, {**QUIET, "name": "a"})
    assert made.checkpoint_callback.filename == "a--{val_loss:.4f}-{epoch}"  # type: ignore[union-attr]


def test_nothing_to_manage(caplog: pytest.LogCaptureFixture) -> None:
    assert exp_manager(trainer()) is None and exp_manager(trainer(fast_dev_run=True), QUIET) is None
    assert "it was given no configuration" in caplog.text and "trainer.fast_dev_run is set" in caplog.text


@pytest.mark.parametrize("key", ["create_dllogger_logger", "create_fault_tolerance_callback"])
def test_keys_without_effect_are_named(key: str, caplog: pytest.LogCaptureFixture) -> None:
    exp_manager(trainer(), {**QUIET, key: True})
    assert f"exp_manager.{key} has no effect (nor has it in NxD Training)" in caplog.text
