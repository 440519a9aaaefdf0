"""Which modules are played from recordings without being asked: `NXD_JAX_REPLAY`.

`torch_bridge.optimize` asks for one module. Models of `initialize_parallel_model` are played unless the variable is 0; where it is "all", so is every module
that is moved to xla as a whole, as plain torch_xla scripts move theirs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torch_bridge.config.variables import VARIABLES

ALL = "all"
_SWITCH = "NXD_JAX_REPLAY"


def of_parallel_models() -> bool:
    """Whether models of `initialize_parallel_model` are played. Raises ValueError if NXD_JAX_REPLAY is neither 0, 1 nor all."""
    return _said() is not False


def _said() -> bool | str | None:
    found: bool | str | None = VARIABLES[_SWITCH].now()
    return found


class Moving(threading.local):
    """inside: whether this thread is in `moved` already, for a module around."""

    inside = False


MOVING = Moving()


_asked_by_none: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Modules that are played because all are."""


@contextmanager
def moved(module: torch.nn.Module) -> Iterator[None]:
    """Around the outermost `nn.Module._apply`: if all are to be played, play it when it comes to xla; when it leaves (to be exported) it is as it was."""
    everything = _said() == ALL and not isinstance(module, torch.jit.ScriptModule)
    before = everything and on_xla(module)
    MOVING.inside = True
    try:
        yield
    finally:
        MOVING.inside = False
    if everything and on_xla(module) != before:
        from torch_bridge.replay import player

        if not before and not isinstance(module.__dict__.get("forward"), player.Player):
            player.optimize(module)
            _asked_by_none.add(module)
        elif before and module in _asked_by_none:
            player.restore(module)
            _asked_by_none.discard(module)


def on_xla(module: torch.nn.Module) -> bool:
    """Whether the first of its parameters is on xla."""
    parameter = next(module.parameters(), None)
    return parameter is not None and parameter.device.type == "xla"
