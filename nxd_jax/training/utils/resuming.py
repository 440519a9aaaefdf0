"""Which checkpoint a run goes on from: the newest complete one of its own, by step; before there is one, the checkpoint that it is to begin with."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig

from nxd_jax.checkpoint import tags, writing
from nxd_jax.checkpoint.storage import BaseCheckpointStorage, FilesysCheckpointStorage, FsspecCheckpointStorage, create_checkpoint_storage
from nxd_jax.training.utils.experiment_dirs import VERSION
from torch_bridge.mesh import processes

logger = logging.getLogger("nxd_jax")

SUFFIX = ".ckpt"
_STEP = re.compile(r"(?<![A-Za-z0-9])(?:global_)?step=(\d+)")
_REPLACED = (".new", ".old")


class Tag(NamedTuple):
    """A complete checkpoint. step: optimizer steps that it is of, None if nothing says so."""

    name: str
    step: int | None


def is_address(folder: object) -> bool:
    """Whether it is an address such as s3://bucket/path, not a path."""
    return "://" in str(folder)


def join(folder: object, name: str) -> str:
    """A path or an address below a folder."""
    return f"{str(folder).rstrip('/')}/{name}"


def lies_in(path: str, folder: object) -> bool:
    """Whether a checkpoint lies in a folder, however both are written."""
    parent = path.rstrip("/").rpartition("/")[0]
    if is_address(parent) or is_address(folder):
        return parent == str(folder).rstrip("/")
    return Path(parent or ".").resolve() == Path(str(folder)).resolve()


def complete_tags(folder: object) -> list[Tag]:
    """Complete checkpoints in a folder (a path or an address), oldest first: by step, then by when they were completed."""
    storage = create_checkpoint_storage(str(folder))
    names: dict[str, None] = {}
    for found in storage.completed_tags():
        name = found
        for ending in _REPLACED:  # what a crash leaves while a checkpoint is replaced: loading its name finds them
            name = name.removesuffix(ending)
        if name.endswith(SUFFIX):
            names.pop(name, None)
            names[name] = None
    made = [Tag(name, _step_of(storage, name)) for name in names]
    return sorted(made, key=lambda tag: -1 if tag.step is None else tag.step)  # stable: among equals by completion


def incomplete_tags(folder: object) -> list[str]:
    """Checkpoints that were begun and never completed."""
    storage = create_checkpoint_storage(str(folder))
    if isinstance(storage, FilesysCheckpointStorage):
        return [name for name in tags.unfinished(storage.root) if name.endswith((SUFFIX, *(SUFFIX + ending for ending in _REPLACED)))]
    assert isinstance(storage, FsspecCheckpointStorage)
    if not storage.files.exists(storage.base):
        return []
    done = set(storage.completed_tags())
    entries = [e["name"].rstrip("/").rpartition("/")[2] for e in storage.files.ls(storage.base, detail=True) if e["type"] == "directory"]
    return [name for name in entries if name.endswith(SUFFIX) and name not in done]


def step_in(name: str) -> int | None:
    """The step that a checkpoint's name says."""
    found = _STEP.findall(name)
    return int(found[-1]) if found else None


def _step_of(storage: BaseCheckpointStorage, name: str) -> int | None:
    said = step_in(name)
    if said is not None:
        return said
    step = _content(storage, name).get("global_step")
    return int(step) if isinstance(step, int) else None


def _content(storage: BaseCheckpointStorage, name: str) -> Mapping[str, Any]:
    """A checkpoint's user_content.pt; empty if it cannot be read (loading will say why)."""
    for choice in (name, *(name + ending for ending in _REPLACED)):
        try:
            if storage.file_exists(f"{choice}/{writing.USER}"):
                found = storage.load_object(f"{choice}/{writing.USER}", map_location="cpu")
                return found if isinstance(found, Mapping) else {}
        except Exception:
            logger.debug("%s/%s cannot be read", name, writing.USER, exc_info=True)
    return {}


def newest(folder: object) -> str | None:
    """The newest complete checkpoint in a folder, None without one."""
    found = complete_tags(folder)
    return join(folder, found[-1].name) if found else None


def choose(cfg: DictConfig, folder: object, log_dir: Path) -> str | None:
    """The checkpoint to go on from, the same for all processes; None: from the beginning.

    With `resume_if_exists` the newest complete one in `folder`; without any there, `resume_from_checkpoint`. An incomplete one is never chosen.

    Raises FileNotFoundError if `resume_from_checkpoint` is not there, or `resume_if_exists` finds nothing and `resume_ignore_no_checkpoint` is False.
    """
    own = _own(cfg, folder) if cfg.resume_if_exists else None
    base = cfg.resume_from_checkpoint
    if own is not None and base:
        logger.info(
            "going on from the run's own %s; it began with exp_manager.resume_from_checkpoint=%s, which is not loaded again", own, base
        )
    if own is None and base:
        check_base(base)
    if own is None and not base and cfg.resume_if_exists:
        _nothing(cfg, folder, log_dir)
    return processes.exchange("resume from", (own or base or "").encode())[0].decode() or None


def _own(cfg: DictConfig, folder: object) -> str | None:
    found = complete_tags(folder)
    passed = incomplete_tags(folder)
    if passed:
        logger.warning("%s: not complete, and so not gone on from: %s", folder, ", ".join(passed[-8:]))
    return join(folder, found[-1].name) if found else None


def check_base(path: str) -> None:
    """Raise FileNotFoundError if the checkpoint of `exp_manager.resume_from_checkpoint` is not there."""
    parent, _, name = path.rstrip("/").rpartition("/")
    storage = create_checkpoint_storage(parent or ("/" if path.startswith("/") else "."))
    if isinstance(storage, FilesysCheckpointStorage):
        there = any((storage.root / (name + ending)).exists() for ending in ("", *_REPLACED))
    else:
        assert isinstance(storage, FsspecCheckpointStorage)
        there = bool(storage.files.exists(f"{storage.base}/{name}"))
    if not there:
        beside = ", ".join(storage.completed_tags()[-8:])
        raise FileNotFoundError(
            f"exp_manager.resume_from_checkpoint: there is no checkpoint {path}"
            + (f"; complete ones beside it are {beside}" if beside else "")
        )


def _nothing(cfg: DictConfig, folder: object, log_dir: Path) -> None:
    """Say that there is no checkpoint, or refuse to begin without."""
    other = _other_versions(cfg, folder, log_dir)
    if not cfg.resume_ignore_no_checkpoint:
        raise FileNotFoundError(
            f"exp_manager.resume_if_exists: there is no complete checkpoint in {folder}{other}. Set resume_ignore_no_checkpoint to True to begin without"
        )
    logger.warning("there is no complete checkpoint in %s: training begins from scratch%s", folder, other)


def _other_versions(cfg: DictConfig, folder: object, log_dir: Path) -> str:
    """A word on checkpoints of other versions of this experiment, which this one does not go on from."""
    plain_place = Path(cfg.exp_dir or "nemo_experiments").expanduser() / (cfg.name or "default")  # a run without a version
    if cfg.explicit_log_dir or is_address(folder) or not log_dir.parent.is_dir() or log_dir.absolute() == plain_place.absolute():
        return ""
    versions = [p.name for p in sorted(log_dir.parent.iterdir()) if p != log_dir and tags.completed(p / "checkpoints")]
    if not versions:
        return ""
    return (
        f" ({log_dir.parent} has some of other versions: {', '.join(versions[-4:])}; to go on from one, set exp_manager.version, or {VERSION}, to its name; "
        f"without any version ({VERSION} unset), every run with resume_if_exists uses one folder)"
    )
