"""`neuronx_distributed_training.utils.exp_manager`: the folder of an experiment, its logs and loggers, its checkpoints, and where it goes on from.

    log_dir = exp_manager(trainer, cfg.exp_manager)

| file | what it does |
|---|---|
| `experiment_config` | the keys |
| `experiment_dirs` | the folder |
| `experiment_logs` | log files, TensorBoard, wandb, MLflow |
| `model_checkpoint` | names of checkpoints, and which are kept |
| `resuming` | which one a run goes on from |
| `callbacks`, `ema` | step times, limits of time, SIGTERM, averaged weights |
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, Timer
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from nxd_jax.training.lightning_modules.nlp_checkpoint_io import NLPCheckpointIO
from nxd_jax.training.utils import experiment_config, experiment_dirs, experiment_logs, resuming
from nxd_jax.training.utils.callbacks import PreemptionCallback, StatelessTimer, TimingCallback, skip_validation_on_resume
from nxd_jax.training.utils.ema import EMA
from nxd_jax.training.utils.experiment_config import CallbackParams, ExpManagerConfig
from nxd_jax.training.utils.model_checkpoint import NeMoModelCheckpoint
from torch_bridge.mesh import processes, world

__all__ = ["EMA", "CallbackParams", "ExpManagerConfig", "NeMoModelCheckpoint", "StatelessTimer", "TimingCallback", "exp_manager"]

logger = logging.getLogger("nxd_jax")

_WITHOUT_EFFECT = ("create_straggler_detection_callback", "create_fault_tolerance_callback")


def exp_manager(trainer: Any, cfg: DictConfig | None = None) -> Path | None:
    """Give a Trainer the folder, loggers, callbacks and checkpoint of an experiment; returns the folder. cfg: `exp_manager` of a configuration, or a dict.

    Sets `trainer.ckpt_path` to what training goes on from: with `resume_if_exists` the newest complete checkpoint of this run, else
    `resume_from_checkpoint`. Without cfg, or with `fast_dev_run`, nothing is done (None).

    Raises ValueError for keys and values that do not fit, FileNotFoundError for a checkpoint or file that is not there, MisconfigurationException where the
    Trainer has a logger or ModelCheckpoint already, ModuleNotFoundError for loggers that are not installed.
    """
    if cfg is None or trainer.fast_dev_run:
        logger.warning("exp_manager does nothing: %s", "it was given no configuration" if cfg is None else "trainer.fast_dev_run is set")
        return None
    cfg = experiment_config.read(cfg)
    for key in _WITHOUT_EFFECT:
        if cfg[key]:
            logger.warning("exp_manager.%s has no effect (nor has it in NxD Training)", key)
    place = experiment_dirs.place_of(cfg, trainer)
    folder = _checkpoint_folder(cfg, place)
    loggers = experiment_logs.make_loggers(cfg, place, trainer)
    chosen = resuming.choose(cfg, folder, place.log_dir)
    _open_folder(cfg, place, chosen, folder)
    if loggers != list(trainer.loggers):
        trainer.loggers = loggers
    trainer._default_root_dir = str(place.log_dir)
    _add_callbacks(cfg, trainer)
    if cfg.create_checkpoint_callback:
        _add_checkpoint_callback(cfg, trainer, place, folder)
    _resume(cfg, trainer, chosen, folder)
    return place.log_dir


def _checkpoint_folder(cfg: DictConfig, place: experiment_dirs.Place) -> str:
    said = cfg.checkpoint_callback_params.dirpath
    if said is None and cfg.checkpoint_callback_params.filepath is not None:
        said = str(Path(cfg.checkpoint_callback_params.filepath).parent)
    if said is None:
        return str(place.log_dir / "checkpoints")
    return str(said) if resuming.is_address(said) else str(Path(said).expanduser())


def _open_folder(cfg: DictConfig, place: experiment_dirs.Place, chosen: str | None, folder: str) -> None:
    """Make the folder, move away what an earlier run left there, begin log files."""
    experiment_logs.close_log_files()
    if chosen is not None and chosen.rpartition("/")[0] == folder.rstrip("/"):
        experiment_dirs.move_old_files(place.log_dir)
    place.log_dir.mkdir(parents=True, exist_ok=True)
    experiment_logs.open_log_files(place.log_dir, cfg.log_local_rank_0_only, cfg.log_global_rank_0_only)
    if world.current().first_here:
        experiment_dirs.write_run_files(place.log_dir, cfg.files_to_copy)
    processes.barrier("experiment folder")
    logger.info("the experiment's folder is %s", place.log_dir)


def _add_callbacks(cfg: DictConfig, trainer: Trainer) -> None:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    if cfg.log_step_timing:
        callbacks.insert(0, TimingCallback(**cfg.step_timing_kwargs))
    _limit_time(cfg, callbacks)
    if cfg.create_preemption_callback and cfg.create_checkpoint_callback:
        callbacks.append(PreemptionCallback())
    if cfg.create_early_stopping_callback:
        callbacks.append(EarlyStopping(**cfg.early_stopping_callback_params))
    if cfg.ema.enable:
        callbacks.append(EMA(cfg.ema.decay, cfg.ema.validate_original_weights, cfg.ema.every_n_steps, cfg.ema.cpu_offload))
    if cfg.disable_validation_on_resume:
        skip_validation_on_resume(trainer)


def _limit_time(cfg: DictConfig, callbacks: list[Any]) -> None:
    """`trainer.max_time`, which Lightning counts over all runs, is each run's here, as in the original; `max_time_per_run` comes first."""
    timers = [k for k, callback in enumerate(callbacks) if isinstance(callback, Timer)]
    if cfg.max_time_per_run is not None:
        for k in reversed(timers):
            del callbacks[k]
        callbacks.append(StatelessTimer(cfg.max_time_per_run))
        return
    for k in timers:
        if not isinstance(callbacks[k], StatelessTimer) and callbacks[k]._duration is not None:
            callbacks[k] = StatelessTimer({"seconds": callbacks[k]._duration})


def _add_checkpoint_callback(cfg: DictConfig, trainer: Trainer, place: experiment_dirs.Place, folder: str) -> None:
    own = [type(c).__name__ for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    if own:
        raise MisconfigurationException(
            f"the Trainer has a {own[0]}, and exp_manager.create_checkpoint_callback would make another: leave it out of callbacks (and "
            "trainer.enable_checkpointing False), or set create_checkpoint_callback to False"
        )
    options = dict(cfg.checkpoint_callback_params)
    filepath = options.pop("filepath")
    if filepath is not None:
        logger.warning("checkpoint_callback_params.filepath is deprecated: set dirpath and filename")
    options["dirpath"] = folder
    options["filename"] = (
        options["filename"] or (Path(filepath).name if filepath else None) or _default_name(cfg, place, options["monitor"])
    )
    trainer.callbacks.append(NeMoModelCheckpoint(n_resume=bool(cfg.resume_if_exists), **options))  # type: ignore[attr-defined]


def _default_name(cfg: DictConfig, place: experiment_dirs.Place, monitor: str | None) -> str:
    name = place.name or cfg.name or "default"
    return f"{name}--{{{monitor}:.4f}}-{{epoch}}" if monitor else f"{name}--{{step}}-{{epoch}}"


def _resume(cfg: DictConfig, trainer: Trainer, chosen: str | None, folder: str) -> None:
    io = trainer.strategy.checkpoint_io
    if isinstance(io, NLPCheckpointIO):
        io.run_folder = folder
        io.base = cfg.resume_from_checkpoint
    if chosen is not None:
        trainer.ckpt_path = chosen
        logger.info("training goes on from %s", chosen)
