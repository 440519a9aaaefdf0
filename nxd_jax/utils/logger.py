"""`neuronx_distributed.utils.logger`: loggers that write to stdout, by default on rank 0 only. (The library's own messages go to logger "nxd_jax".)"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.FATAL,
    "off": logging.FATAL + 1,
}


@functools.cache
def get_log_level() -> int:
    """`NXD_LOG_LEVEL` as a number of `logging`: trace, debug, info (the default), warning, error, fatal, or off. Raises ValueError for others.

    It is read once: `get_log_level.cache_clear()` has it read again.
    """
    name = os.environ.get("NXD_LOG_LEVEL") or "info"
    if name.lower() not in _LEVELS:
        raise ValueError(f"NXD_LOG_LEVEL={name!r} must be one of {', '.join(_LEVELS)}")
    return _LEVELS[name.lower()]


def get_logger(name: str = "neuronx_distributed", rank0_only: bool = True) -> logging.Logger:
    """`utils.logger.get_logger`: the logger `name[0]`, whose messages only the process of rank 0 writes, or `name[]`, whose messages all write.

    Lines are `[time level path:line] message`; `NXD_LOG_HIDE_TIME=1` leaves the time out. The level is that of the first call (`get_log_level`).
    """
    logger = logging.getLogger(f"{name}[0]" if rank0_only else f"{name}[]")
    if any(isinstance(h, _Stdout) for h in logger.handlers):
        return logger
    handler = _Stdout()
    handler.setFormatter(_formatter())
    if rank0_only:
        logger.addFilter(_on_rank_0)
    logger.addHandler(handler)
    logger.propagate = False
    level = get_log_level()
    logger.setLevel(level)
    logger.disabled = level > logging.FATAL
    logger.initialized = True  # type: ignore[attr-defined]
    return logger


def _rank0_only(fn: Callable[..., Any], default: Any = None) -> Callable[..., Any]:
    """A logger's method that only rank 0 calls, by torch.distributed or else `RANK`; other ranks return `default`."""

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        if int(dist.get_rank() if dist.is_initialized() else os.environ.get("RANK") or 0):
            return default
        return fn(*args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})

    return called


class _Stdout(logging.StreamHandler[Any]):
    """Writes to what `sys.stdout` is at the time."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.relativepath = _relative(record.pathname)
        return super().format(record)


def _formatter() -> logging.Formatter:
    hidden = os.environ.get("NXD_LOG_HIDE_TIME", "").lower() in ("1", "true")
    time = "" if hidden else "%(asctime)s.%(msecs)03d: "
    return _Formatter(f"[{time}%(levelname).1s %(relativepath)s:%(lineno)d] %(message)s", "%Y-%m-%d %H:%M:%S")


def _relative(path: str) -> str:
    """A file's path below the longest entry of `sys.path` that holds it."""
    roots = [os.path.join(os.path.abspath(p), "") for p in sys.path]
    found = max((root for root in roots if path.startswith(root)), key=len, default="")
    return path[len(found) :]


def _on_rank_0(record: logging.LogRecord) -> bool:
    """Whether this process hosts rank 0 (it decides for all ranks that it hosts)."""
    from torch_bridge.mesh import world

    return world.first() == 0
