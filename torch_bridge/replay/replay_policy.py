"""Which modules are played from recordings without being asked: `NXD_JAX_REPLAY`.

`torch_bridge.optimize` asks for one module. Models of `initialize_parallel_model` are played unless the variable is 0. Every module that is moved to xla as a
whole, as plain torch_xla scripts move theirs, is played too: with "auto", the default, once calls of its kind have come a few times; with "all" from the first
one on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torch_bridge.config.variables import VARIABLES

AUTO, ALL = "auto", "all"
_SWITCH = "NXD_JAX_REPLAY"


def of_parallel_models() -> bool:
    """Whether models of `initialize_parallel_model` are played. Raises ValueError if NXD_JAX_REPLAY is neither 0, 1, auto nor all."""
    return said() is not False


def said() -> bool | str:
    """NXD_JAX_REPLAY: False, True, "auto" (also where it is not set) or "all". Raises ValueError for anything else."""
    found: bool | str | None = VARIABLES[_SWITCH].now()
    return AUTO if found is None else found


class Moving(threading.local):
    """inside: whether this thread is in `moved` already, for a module around."""

    inside = False


MOVING = Moving()


@contextmanager
def moved(module: torch.nn.Module) -> Iterator[None]:
    """Around the outermost `nn.Module._apply`: if all are to be played, play it when it comes to xla; when it leaves (to be exported) it is as it was."""
    switch = said()
    everything = switch in (AUTO, ALL) and not isinstance(module, torch.jit.ScriptModule)
    before = everything and on_xla(module)
    MOVING.inside = True
    try:
        yield
    finally:
        MOVING.inside = False
    if everything and on_xla(module) != before:
        from torch_bridge.replay import player

        if before:
            player.restore_unasked(module)
        else:
            player.play_unasked(module, 0 if switch == ALL else player.WARM_UP)


def on_xla(module: torch.nn.Module) -> bool:
    """Whether the first of its parameters is on xla."""
    parameter = next(module.parameters(), None)
    return parameter is not None and parameter.device.type == "xla"
