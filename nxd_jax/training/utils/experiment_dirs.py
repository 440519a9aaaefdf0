"""Where an experiment writes: `<exp_dir>/<name>/<version>`, by the original's rules; what an earlier run left there moves to `run_<n>`."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from nxd_jax.checkpoint import tags
from torch_bridge.mesh import processes, world

logger = logging.getLogger("nxd_jax")

_LAUNCH = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")
"""A version that is a time."""

VERSION = "NEMO_EXPM_VERSION"
"""The variable that names the version, where the configuration does not."""


class Place(NamedTuple):
    """log_dir: where everything goes, `exp_dir/name/version`; with `explicit_log_dir`, exp_dir is that folder and name and version are empty."""

    log_dir: Path
    exp_dir: str
    name: str
    version: str | None


def place_of(cfg: DictConfig, trainer: Any) -> Place:
    """The folder of an experiment, the same for all processes.

    Raises MisconfigurationException for a Trainer that has a logger, which says where, together with keys that say so too.
    """
    found = _place(cfg, trainer)
    if cfg.explicit_log_dir or world.process_count() == 1:
        return found
    version = processes.exchange("experiment version", (found.version or "").encode())[0].decode()
    return found._replace(log_dir=Path(found.exp_dir) / found.name / version, version=version or None)


def _place(cfg: DictConfig, trainer: Any) -> Place:
    if cfg.explicit_log_dir:
        return _explicit(cfg, trainer)
    own = trainer.logger
    if own is not None:
        return _of_logger(cfg, own)
    exp_dir = str(Path(cfg.exp_dir).expanduser()) if cfg.exp_dir else str(Path.cwd() / "nemo_experiments")
    name = cfg.name or "default"
    version = cfg.version or _of_launch(cfg, Path(exp_dir) / name) or None
    if version is None and not cfg.resume_if_exists:
        version = time.strftime("%Y-%m-%d_%H-%M-%S") if cfg.use_datetime_version else f"version_{TensorBoardLogger(exp_dir, name).version}"
    return Place(Path(exp_dir) / name / (version or ""), exp_dir, name, version)


def _of_launch(cfg: DictConfig, folder: Path) -> str:
    """What the variable says; with resume_if_exists, where it is the time of this launch, the newest earlier launch that has a complete checkpoint.

    The original's train_setup.sh sets it anew at each launch, so that nothing there goes on.
    """
    said = os.environ.get(VERSION) or ""
    if not cfg.resume_if_exists or not _LAUNCH.fullmatch(said) or not folder.is_dir():
        return said
    launches = sorted(place.name for place in folder.iterdir() if _LAUNCH.fullmatch(place.name) and place.name <= said)
    with_checkpoints = [launch for launch in launches if _has_checkpoints(folder / launch)]
    if not with_checkpoints or with_checkpoints[-1] == said:
        return said
    logger.warning(
        "exp_manager.resume_if_exists: %s=%s is the time of this launch, and has no checkpoint: going on with %s, the newest launch in %s that has one. "
        "exp_manager.version=%s begins anew",
        VERSION,
        said,
        with_checkpoints[-1],
        folder,
        said,
    )
    return with_checkpoints[-1]


def _has_checkpoints(version: Path) -> bool:
    return bool(tags.completed(version / "checkpoints"))


def _explicit(cfg: DictConfig, trainer: Any) -> Place:
    if trainer.logger is not None:
        raise MisconfigurationException(
            f"exp_manager.explicit_log_dir={cfg.explicit_log_dir} and a Trainer with a logger of its own, which has another folder: make the Trainer with "
            "logger=False, or leave explicit_log_dir out"
        )
    beside = [key for key in ("exp_dir", "name", "version") if cfg[key]]
    if beside:
        logger.warning(
            "exp_manager.explicit_log_dir=%s is the folder, and %s have no effect on it", cfg.explicit_log_dir, ", ".join(beside)
        )
    folder = str(Path(cfg.explicit_log_dir).expanduser())
    return Place(Path(folder), folder, "", "")


def _of_logger(cfg: DictConfig, own: Any) -> Place:
    twice = [
        key for key, theirs in (("exp_dir", own.save_dir), ("name", own.name), ("version", own.version)) if cfg[key] and theirs is not None
    ]
    if twice:
        raise MisconfigurationException(
            f"the Trainer has a {type(own).__name__}, which says where to write, and exp_manager has {', '.join(twice)} too: leave those out, or make the "
            "Trainer with logger=False"
        )
    exp_dir = str(own.save_dir or cfg.exp_dir or Path.cwd() / "nemo_experiments")
    version = own.version if isinstance(own.version, str) else f"version_{own.version}"
    return Place(Path(exp_dir) / str(own.name) / version, exp_dir, str(own.name), version)


def move_old_files(log_dir: Path) -> None:
    """Files of earlier runs at the top of the folder go to `run_<n>`, n the next number. All processes call it; the first one moves."""
    if world.current().first_here and log_dir.is_dir():
        files = [p for p in log_dir.iterdir() if p.is_file()]
        if files:
            target = _next_run(log_dir)
            target.mkdir()
            for file in files:
                shutil.move(str(file), str(target))
    processes.barrier("experiment files moved")


def _next_run(log_dir: Path) -> Path:
    numbers = [int(n) for p in log_dir.glob("run_*") if p.is_dir() and (n := p.name.removeprefix("run_")).isdigit()]
    return log_dir / f"run_{max(numbers, default=-1) + 1}"


def write_run_files(log_dir: Path, files_to_copy: Iterable[str] | None) -> None:
    """The command line as `cmd-args.log`, and copies of `files_to_copy`. Raises FileNotFoundError, naming all that are not there."""
    (log_dir / "cmd-args.log").write_text(" ".join(sys.argv))
    files = [Path(f).expanduser() for f in files_to_copy or ()]
    missing = [str(f) for f in files if not f.is_file()]
    if missing:
        raise FileNotFoundError(f"exp_manager.files_to_copy: there is no file {', '.join(missing)}")
    for file in files:
        shutil.copy(file, log_dir)
