"""Runs of the small model as an experiment: `nxd_jax.training.workflow.train` with a place for callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pytorch_lightning import Callback, Trainer

from nxd_jax.training import environment
from nxd_jax.training.utils.exp_manager import exp_manager
from nxd_jax.training.workflow import make_trainer
from tests.nxd_jax.training import small

FILENAME = "small--{step}-{consumed_samples}"


class Stopped(Exception):
    pass


class Stop(Callback):
    """A crash at the beginning of a step."""

    def __init__(self, step: int):
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise Stopped


def words(folder: Path, *changes: str, every: int = 2, **params: Any) -> list[str]:
    """A configuration's changes: checkpoints by step, the last one kept, resumed if there are any."""
    chosen = {
        "every_n_train_steps": every,
        "filename": FILENAME,
        "monitor": "step",
        "mode": "max",
        "save_top_k": 1,
        "save_last": False,
        **params,
    }
    said = {
        "exp_dir": str(folder),
        "name": "small",
        "resume_if_exists": True,
        "resume_ignore_no_checkpoint": True,
        "create_tensorboard_logger": False,
        **{f"checkpoint_callback_params.{name}": value for name, value in chosen.items()},
    }
    return [
        "trainer.enable_progress_bar=False",
        *(f"exp_manager.{name}={'null' if v is None else v}" for name, v in said.items()),
        *changes,
    ]


def trainer_of(*changes: str) -> tuple[Any, Any]:
    """A Trainer as `workflow.train` makes it, and the configuration."""
    cfg = small.config(*changes)
    environment.process_config(cfg)
    return make_trainer(cfg), cfg


def run(*changes: str, stop: int | None = None, callbacks: Any = (), module: Any = small.Module) -> tuple[Any, Any]:
    """Train; the Trainer and the module, whose `seen` has what was logged. stop: crash when this step begins."""
    trainer, cfg = trainer_of(*changes)
    exp_manager(trainer, cfg.exp_manager)
    trainer.callbacks[:0] = callbacks
    if stop is not None:
        trainer.callbacks.append(Stop(stop))
    data, model = small.Data(cfg, trainer), module(cfg, trainer)
    try:
        trainer.fit(model, datamodule=data, ckpt_path=OmegaConf.select(cfg, "exp_manager.resume_from_checkpoint"))
    except Stopped:
        assert stop is not None
    return trainer, model


def losses(model: Any) -> list[float]:
    return [seen["loss"] for seen in model.seen]


def kept(folder: Path) -> list[str]:
    """Names of checkpoints, and `(unfinished)` behind those that are."""
    found = sorted((folder / "small" / "checkpoints").iterdir())
    return [p.name + ("" if (p / "done").exists() else " (unfinished)") for p in found]
