"""Which modules are played from recordings without being asked: `NXD_JAX_REPLAY`.

`torch_bridge.optimize` asks for one module. Models of `initialize_parallel_model` are played unless the variable is 0; where it is "all", so is every module
that is moved to xla as a whole, as plain torch_xla scripts move theirs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torch_bridge.variables import VARIABLES

ALL = "all"
_SWITCH = "NXD_JAX_REPLAY"


def of_parallel_models() -> bool:
    """Whether models of `initialize_parallel_model` are played. Raises ValueError if NXD_JAX_REPLAY is neither 0, 1 nor all."""
    return _said() is not False


def _said() -> bool | str | None:
    found: bool | str | None = VARIABLES[_SWITCH].parse(os.environ.get(_SWITCH, ""))
    return found


class Moving(threading.local):
    """inside: whether this thread is in `moved` already, for a module around."""

    inside = False


MOVING = Moving()


@contextmanager
def moved(module: torch.nn.Module) -> Iterator[None]:
    """Around the outermost `nn.Module._apply`: play the module if it came to xla and all modules are to be played."""
    may = _said() == ALL and not on_xla(module) and not isinstance(module, torch.jit.ScriptModule)
    MOVING.inside = True
    try:
        yield
    finally:
        MOVING.inside = False
    if may and on_xla(module):
        from torch_bridge import replay

        replay.optimize(module)


def on_xla(module: torch.nn.Module) -> bool:
    """Whether the first of its parameters is on xla."""
    parameter = next(module.parameters(), None)
    return parameter is not None and parameter.device.type == "xla"
