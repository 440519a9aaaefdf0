"""Checkpoints of runs: names, which are kept, over resumes and ends of all kinds; and that training goes on bit for bit."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.utilities.exceptions import MisconfigurationException, SIGTERMException

from nxd_jax.checkpoint import writing
from nxd_jax.utils.full_weights import gather_full
from tests.nxd_jax.lightning.jobs import MARKS
from tests.nxd_jax.training import small
from tests.nxd_jax.training.utils import runs
from torch_bridge.recorder import sharded

pytestmark = [
    *MARKS,
    pytest.mark.usefixtures("variables"),
    pytest.mark.filterwarnings("ignore:.*is not resumable"),
    pytest.mark.filterwarnings("ignore:XLA_DOWNCAST_BF16 is deprecated"),
]

STEPS = "trainer.max_steps=6"
DP2 = "trainer.devices=2"
PP2 = ("trainer.devices=4", "distributed_strategy.pipeline_model_parallel_size=2")
TP2 = ("trainer.devices=4", "distributed_strategy.tensor_model_parallel_size=2")


def moments(trainer: Any) -> list[torch.Tensor]:
    """Each rank's shards of the ZeRO-1 optimizer's moments."""
    inner = trainer.optimizers[0]
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    states = inner.base_optimizer.state.values()
    return [shard.clone() for state in states for name in ("exp_avg", "exp_avg_sq") for shard in sharded.shards(state[name])]


def test_the_tree_after_two_runs(tmp_path: Path) -> None:
    """save_top_k 1: the last one, also of the run before; samples are those of the step though logged every 5 steps; the name has a -v in it."""
    words = runs.words(tmp_path / "llama-v2", DP2, "trainer.log_every_n_steps=5", "exp_manager.create_tensorboard_logger=True")
    runs.run(*words, "trainer.max_steps=4")
    folder = tmp_path / "llama-v2"
    assert runs.kept(folder) == ["small--step=4-consumed_samples=32.0.ckpt"]
    trainer, _ = runs.run(*words, STEPS)
    assert trainer.global_step == 6 and runs.kept(folder) == ["small--step=6-consumed_samples=48.0.ckpt"]
    top = {"cmd-args.log", "hparams.yaml", "lightning_logs.txt", "nemo_error_log.txt", "nemo_log_globalrank-0_localrank-0.txt"}
    for place in (folder / "small", folder / "small" / "run_0"):
        files = {p.name for p in place.iterdir() if p.is_file()}
        assert {n for n in files if not n.startswith("events.out.tfevents.")} == top and len(files) == len(top) + 1
    inside = {p.name for p in (folder / "small" / "checkpoints" / runs.kept(folder)[0]).iterdir()}
    assert inside >= {"checkpoint", "model", "optim", "user_content.pt", "done"}


@pytest.mark.core(keep=1)
@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    "changes",
    [
        (DP2,),
        (*PP2, "exp_manager.async_checkpointing=True"),
        (*TP2, "precision.type=mixed_precision", "exp_manager.ema.enable=True", "trainer.val_check_interval=2"),
    ],
    ids=["zero1 dp 2", "pp 2, in the background", "tp 2, mixed precision, averages"],
)
def test_goes_on_bit_for_bit(tmp_path: Path, changes: tuple[str, ...]) -> None:
    """After a crash in step 5 of 6: losses, weights, each rank's own moments."""
    whole, wanted = runs.run(*runs.words(tmp_path / "whole", *changes), STEPS)
    runs.run(*runs.words(tmp_path / "run", *changes), STEPS, stop=5)
    rest, found = runs.run(*runs.words(tmp_path / "run", *changes), STEPS)
    assert runs.losses(found) == runs.losses(wanted)[4:] and len(found.seen) == 2
    for (name, p), (_, q) in zip(wanted.named_parameters(), found.named_parameters(), strict=True):
        assert torch.equal(gather_full(p), gather_full(q)), name
    if "trainer.devices=2" in changes:
        pairs = list(zip(moments(whole), moments(rest), strict=True))
        assert all(torch.equal(a, b) for a, b in pairs) and not torch.equal(pairs[0][0], pairs[1][0])
    averages = [next((c.averages for c in t.callbacks if hasattr(c, "averages")), {}) for t in (whole, rest)]
    assert averages[0].keys() == averages[1].keys()
    assert all(torch.equal(gather_full(a), gather_full(averages[1][name])) for name, a in averages[0].items())


@pytest.mark.thorough(keep=2)
@pytest.mark.core(keep=0)
@pytest.mark.parametrize(
    ("params", "first", "second"),
    [
        ({"save_top_k": 2}, ["2", "4"], ["4", "6"]),
        ({"save_top_k": -1}, ["2", "4"], ["2", "4", "6"]),
        ({"save_top_k": 1, "save_last": True}, ["4", "4-last"], ["6", "6-last"]),
        ({"save_top_k": 0, "save_last": True}, ["4-last"], ["6-last"]),
        ({"every": None, "train_time_interval": 0}, ["5"], ["6"]),
        ({"monitor": "reduced_train_loss", "mode": "min", "save_top_k": 1, "filename": "s--{step}-{reduced_train_loss:.4f}"}, None, None),
    ],
)
def test_what_is_kept(tmp_path: Path, params: dict[str, Any], first: list[str] | None, second: list[str] | None) -> None:
    words = runs.words(tmp_path, **params)
    runs.run(*words, STEPS, stop=5)
    before = runs.kept(tmp_path)
    trainer, _ = runs.run(*words, STEPS)
    after = runs.kept(tmp_path)
    if first is None or second is None:
        assert len(before) == len(after) == 1 and f"{trainer.checkpoint_callback.best_model_score:.4f}" in after[0]
        return

    def named(steps: list[str]) -> list[str]:
        parts = [s.partition("-") for s in steps]
        return sorted(f"small--step={n}-consumed_samples={8.0 * int(n)}{dash}{last}.ckpt" for n, dash, last in parts)

    assert before == named(first) and after == named(second)


def test_the_monitored_loss_is_that_of_the_step(tmp_path: Path) -> None:
    """Of the one that is saved, not of the one that was logged before: from the first step on, and at steps that are not logged."""
    _, wanted = runs.run(*runs.words(tmp_path / "whole"), "trainer.max_steps=4")
    name = "s--{step}-{reduced_train_loss:.4f}"
    words = runs.words(tmp_path, every=1, monitor="reduced_train_loss", save_top_k=-1, filename=name)
    runs.run(*words, "trainer.max_steps=4", "trainer.log_every_n_steps=3")
    losses = runs.losses(wanted)
    assert runs.kept(tmp_path) == [f"s--step={k + 1}-reduced_train_loss={losses[k]:.4f}.ckpt" for k in range(4)]


def test_options_that_a_checkpoint_keeps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another learning rate in the file has no effect on a run that goes on, and a warning says so; the same file says nothing."""
    words = runs.words(tmp_path, DP2)
    runs.run(*words, STEPS, stop=2)
    runs.run(*words, STEPS, stop=4)
    assert "the run goes on with its checkpoint's" not in caplog.text
    _, module = runs.run(*words, STEPS, "model.optim.lr=0.5", "model.optim.weight_decay=0.2", "model.optim.betas=[0.8,0.9]")
    said = "the run goes on with its checkpoint's lr=0.01, weight_decay=0.01, betas=(0.9, 0.99): what model.optim says now has no effect"
    assert said in caplog.text
    assert max(s["lr"] for s in module.seen) < 0.01


def test_a_monitored_value_that_nothing_logs(tmp_path: Path) -> None:
    """Without validation nothing would be saved, without a word; what the module logs after the first step is waited for."""
    words = runs.words(tmp_path, "trainer.limit_val_batches=0", every=1, monitor="steps")
    with pytest.raises(
        MisconfigurationException, match=r"nothing logs 'steps', and there is no validation.*consumed_samples, epoch, global_step"
    ):
        runs.run(*words, STEPS)
    words = runs.words(tmp_path / "norm", "trainer.limit_val_batches=0", every=1, monitor="gradient_norm")
    runs.run(*words, "trainer.max_steps=2")
    assert runs.kept(tmp_path / "norm") == ["small--step=2-consumed_samples=16.0.ckpt"]
    words = runs.words(tmp_path / "last", "trainer.limit_val_batches=0", monitor="steps", save_last=True)
    runs.run(*words, STEPS, stop=3)
    assert runs.kept(tmp_path / "last") == ["small--step=2-consumed_samples=16.0-last.ckpt"]


def test_fewer_are_kept_and_leftovers_go(tmp_path: Path) -> None:
    """save_top_k went from 3 to 1; a killed run left half a checkpoint; somebody keeps something else beside."""
    runs.run(*runs.words(tmp_path, every=1, save_top_k=3), STEPS, stop=3)
    folder = tmp_path / "small" / "checkpoints"
    for name in ("small--step=9-consumed_samples=72.0.ckpt", "mine.ckpt"):
        (folder / name).mkdir()
        (folder / name / "checkpoint").touch()
    assert len(runs.kept(tmp_path)) == 5
    runs.run(*runs.words(tmp_path, every=2, save_top_k=1), STEPS)
    assert runs.kept(tmp_path) == ["mine.ckpt (unfinished)", "small--step=6-consumed_samples=48.0.ckpt"]


class Signal(Callback):
    """SIGTERM in the middle of a step, or of a validation."""

    def __init__(self, step: int, hook: str):
        self.step = step
        setattr(self, hook, self.send)

    def send(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.core(keep=1)
@pytest.mark.parametrize(
    ("hook", "params", "kept"),
    [
        ("on_train_batch_start", {}, "small--step=4-consumed_samples=32.0.ckpt"),
        ("on_validation_batch_start", {"monitor": "val_loss", "mode": "min"}, "small--step=3-consumed_samples=24.0-last.ckpt"),
    ],
)
def test_sigterm_saves(tmp_path: Path, hook: str, params: dict[str, Any], kept: str) -> None:
    words = runs.words(tmp_path, "trainer.val_check_interval=3", every=100, **params)
    with pytest.raises(SIGTERMException):
        runs.run(*words, STEPS, callbacks=(Signal(3, hook),))
    assert runs.kept(tmp_path) == [kept]
    trainer, model = runs.run(*words, STEPS)
    assert trainer.global_step == 6 and len(model.seen) == 6 - int(kept[len("small--step=")])
    assert runs.kept(tmp_path) == [kept]


def test_the_end_of_a_runs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """trainer.max_time is each run's own: the next one has all of it again."""
    words = runs.words(tmp_path, "trainer.max_time=00:01:00:00", every=100)
    late = runs.Stop(99)

    class Slow(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            timer = next(c for c in trainer.callbacks if type(c).__name__ == "StatelessTimer")
            if trainer.global_step in (2, 4):
                timer._duration = 0.0

    for step in (2, 4):
        trainer, _ = runs.run(*words, STEPS, callbacks=(Slow(), late))
        assert trainer.global_step == step and trainer.state.finished
        assert runs.kept(tmp_path) == [f"small--step={step}-consumed_samples={8.0 * step}.ckpt"]


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The former checkpoint stays, and the next start goes on from it."""
    words = runs.words(tmp_path)
    write = writing.write_bytes

    def full(path: Path, data: bytes) -> None:
        if "step=4" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, data)

    for background in ("False", "True"):
        with monkeypatch.context() as patch:
            patch.setattr(writing, "write_bytes", full)
            with pytest.raises(
                OSError, match=r"No space left on device: the checkpoint small--step=4.* earlier checkpoints are as they were. Make room"
            ):
                runs.run(*words, STEPS, f"exp_manager.async_checkpointing={background}", stop=5)
        assert runs.kept(tmp_path) == ["small--step=2-consumed_samples=16.0.ckpt"]
    trainer, model = runs.run(*words, STEPS)
    assert len(model.seen) == 4 and trainer.global_step == 6


def test_on_s3(tmp_path: Path, s3: str) -> None:
    import fsspec

    _, wanted = runs.run(*runs.words(tmp_path / "whole"), STEPS)
    words = runs.words(tmp_path / "run", dirpath=f"{s3}/deep/run", save_top_k=2)
    runs.run(*words, STEPS, stop=5)
    trainer, found = runs.run(*words, STEPS)
    assert str(trainer.ckpt_path).startswith(f"{s3}/deep/run/small--step=4") and runs.losses(found) == runs.losses(wanted)[4:]
    names = sorted(p.rpartition("/")[2] for p in fsspec.filesystem("s3").ls(f"{s3}/deep/run"))
    assert names == [f"small--step={n}-consumed_samples={8.0 * n}.ckpt" for n in (4, 6)]


class Validated(small.Module):
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.validated = [*getattr(self, "validated", []), self.trainer.global_step]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("off", "steps"), [("True", [6]), ("False", [6])])
def test_validation_after_a_resume(tmp_path: Path, off: str, steps: list[int]) -> None:
    """A checkpoint of step 3 is saved before the validation there, which does not run when training goes on from it."""
    words = runs.words(tmp_path, "trainer.val_check_interval=3", f"exp_manager.disable_validation_on_resume={off}", every=3)
    runs.run(*words, STEPS, stop=4, module=Validated)
    _, model = runs.run(*words, STEPS, module=Validated)
    assert model.validated == steps


def test_a_validation_after_the_first_batch_of_a_resume(tmp_path: Path) -> None:
    words = runs.words(tmp_path, "trainer.val_check_interval=2", every=3)
    runs.run(*words, STEPS, stop=4, module=Validated)
    _, model = runs.run(*words, STEPS, module=Validated)
    assert model.validated == [4, 6]


def test_the_best_comes_back(tmp_path: Path) -> None:
    """save_best_model, with the validation loss to watch."""
    words = runs.words(
        tmp_path, "trainer.val_check_interval=2", monitor="val_loss", mode="min", filename="s--{step}-{val_loss:.6f}", save_best_model=True
    )
    trainer, model = runs.run(*words, STEPS)
    callback = trainer.checkpoint_callback
    again = trainer.strategy.load_checkpoint(callback.best_model_path)["state_dict"]
    assert runs.kept(tmp_path) == [os.path.basename(callback.best_model_path)]
    assert all(torch.equal(gather_full(p), again[name]) for name, p in model.named_parameters())


def test_no_checkpoint_would_ever_be_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        MisconfigurationException, match="'val_loss' comes from validation, and trainer.limit_val_batches is 0: no checkpoint would ever"
    ):
        runs.run(*runs.words(tmp_path, "trainer.limit_val_batches=0", monitor="val_loss", mode="min"), STEPS)
    runs.run(*runs.words(tmp_path / "other", every=None), "trainer.max_steps=1")
    assert "no checkpoint will be saved: set checkpoint_callback_params.every_n_train_steps" in caplog.text


def test_step_times_are_logged(tmp_path: Path) -> None:
    trainer, _ = runs.run(
        *runs.words(tmp_path, "trainer.val_check_interval=2", "exp_manager.step_timing_kwargs.sync_cuda=True"), "trainer.max_steps=2"
    )
    found = trainer.logged_metrics
    assert 0 < found["train_step_timing"] < 600 and 0 < found["validation_step_timing"] < 600


@pytest.mark.parametrize("enabled", [True, False])
def test_early_stopping(tmp_path: Path, enabled: bool) -> None:
    stop = (f"exp_manager.create_early_stopping_callback={enabled}", "exp_manager.early_stopping_callback_params.stopping_threshold=100")
    trainer, _ = runs.run(*runs.words(tmp_path, "trainer.val_check_interval=2", *stop), STEPS)
    assert trainer.global_step == (2 if enabled else 6)
