"""What an experiment writes besides checkpoints: log files under the original's names, and Lightning's loggers (TensorBoard, wandb, MLflow)."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from nxd_jax.lightning.logger import NeuronTensorBoardLogger
from nxd_jax.training.utils.experiment_dirs import Place
from torch_bridge.mesh import world

logger = logging.getLogger("nxd_jax")

ERRORS, LIGHTNING = "nemo_error_log.txt", "lightning_logs.txt"
_LIGHTNING = ("pytorch_lightning", "lightning.pytorch", "lightning_fabric", "lightning.fabric")
_FORMAT = "[%(asctime)s %(levelname)s] %(message)s"

_attached: list[tuple[logging.Logger, logging.Handler]] = []
"""Of the experiment that began last."""


def ranks_here() -> tuple[int, int]:
    """The first rank of this process in the world, and on its machine."""
    first = world.first()
    return first, first % world.current().local_size


def open_log_files(log_dir: Path, local_rank_0_only: bool, global_rank_0_only: bool) -> None:
    """From now on write what is logged to `nemo_log_globalrank-G_localrank-L.txt`; the process with rank 0 also writes warnings and errors to
    `nemo_error_log.txt` and Lightning's lines to `lightning_logs.txt`. Files of an experiment before are closed.

    Raises ValueError for both *_only at once.
    """
    if local_rank_0_only and global_rank_0_only:
        raise ValueError("exp_manager.log_local_rank_0_only and log_global_rank_0_only are both True: set one of them, or neither")
    close_log_files()
    global_rank, local_rank = ranks_here()
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers() and logging.lastResort is not None:  # with files, Python would no longer show warnings
        _attach(logger, logging.lastResort)
    if not (local_rank_0_only and local_rank) and not (global_rank_0_only and global_rank):
        _attach(logger, _file(log_dir / f"nemo_log_globalrank-{global_rank}_localrank-{local_rank}.txt", logging.INFO))
    if world.current().first_here:
        errors, lines = _file(log_dir / ERRORS, logging.WARNING), _file(log_dir / LIGHTNING, logging.DEBUG)
        for name in ("nxd_jax", *_LIGHTNING):
            _attach(logging.getLogger(name), errors)
        for name in _LIGHTNING:
            _attach(logging.getLogger(name), lines)


def close_log_files() -> None:
    """Write no more log files."""
    for owner, handler in _attached:
        owner.removeHandler(handler)
        if isinstance(handler, logging.FileHandler):
            handler.close()
    _attached.clear()


def _file(path: Path, level: int) -> logging.FileHandler:
    handler = logging.FileHandler(path, delay=path.name == ERRORS and path.exists())
    handler.setLevel(level)
    handler.setFormatter(logging.Formatter(_FORMAT))
    return handler


def _attach(owner: logging.Logger, handler: logging.Handler) -> None:
    owner.addHandler(handler)
    _attached.append((owner, handler))


# -- loggers -----------------------------------------------------------------------------------------


def make_loggers(cfg: DictConfig, place: Place, trainer: Any) -> list[Any]:
    """The loggers that `create_*_logger` ask for; the Trainer's own if there are none.

    Raises MisconfigurationException if the Trainer has one already, ModuleNotFoundError for one that is not installed, ValueError for options that do not fit.
    """
    asked = [name for name in ("tensorboard", "wandb", "mlflow") if cfg[f"create_{name}_logger"]]
    for name in ("dllogger", "clearml", "neptune"):
        if cfg[f"create_{name}_logger"]:
            logger.warning(
                "exp_manager.create_%s_logger has no effect (nor has it in NxD Training): use TensorBoard, wandb or MLflow", name
            )
    if asked and trainer.loggers:
        own = ", ".join(type(one).__name__ for one in trainer.loggers)
        keys = ", ".join(f"create_{name}_logger" for name in asked)
        raise MisconfigurationException(
            f"the Trainer has a logger ({own}) and exp_manager.{keys} would make another: make the Trainer with logger=False, or set {keys} to False"
        )
    return [_MAKERS[name](cfg, place) for name in asked] or list(trainer.loggers)


def _tensorboard(cfg: DictConfig, place: Place) -> Any:
    options = dict(cfg.summary_writer_kwargs or {})
    if "log_dir" in options:
        raise ValueError(
            "exp_manager.summary_writer_kwargs must not have log_dir: exp_dir, name and version (or explicit_log_dir) say where to write"
        )
    return NeuronTensorBoardLogger(place.exp_dir, name=place.name, version=place.version or "", **options)


def _wandb(cfg: DictConfig, place: Place) -> Any:
    options = dict(cfg.wandb_logger_kwargs or {})
    missing = [key for key in ("name", "project") if not options.get(key)]
    if missing:
        raise ValueError(f"exp_manager.create_wandb_logger needs wandb_logger_kwargs.{' and '.join(missing)}")
    _need("wandb", "wandb")
    from pytorch_lightning.loggers import WandbLogger

    return WandbLogger(**{"save_dir": str(place.log_dir), "version": place.version, **options})


def _mlflow(cfg: DictConfig, place: Place) -> Any:
    options = dict(cfg.mlflow_logger_kwargs or {})
    _need("mlflow", "mlflow")
    from pytorch_lightning.loggers import MLFlowLogger

    return MLFlowLogger(**{"experiment_name": place.name or cfg.name or "default", **options})


_MAKERS: dict[str, Callable[[Any, Place], Any]] = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}


def _need(name: str, package: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise ModuleNotFoundError(
            f"exp_manager.create_{name}_logger needs the package {package}: pip install {package}, or set create_{name}_logger to False",
            name=name,
        )
