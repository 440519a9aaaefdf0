"""Forked children (DataLoader workers) must not touch the device: JAX does not survive a fork."""

from __future__ import annotations

_forked = False


def mark_forked() -> None:
    """Called in the child of a fork that happened after JAX was imported."""
    global _forked
    _forked = True


def is_forked() -> bool:
    return _forked


def check() -> None:
    """Raise `RuntimeError` in a forked child."""
    if _forked:
        raise RuntimeError(
            "an xla tensor was made or computed in a forked process (a DataLoader worker?), where JAX cannot run. Return CPU tensors from datasets and "
            "collate functions and move them in the training loop or with MpDeviceLoader; or start workers with multiprocessing_context='spawn'."
        )
