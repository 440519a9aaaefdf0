"""The warning, once, that a file holds the first hosted rank's values of what differs by rank."""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Iterator

from torch_bridge.mesh import world

_noted = False
_asked_for: contextvars.ContextVar[bool] = contextvars.ContextVar("_asked_for", default=False)


def noted() -> bool:
    """Whether it has been said, or need not be: this process hosts one rank, or the first rank's values are asked for."""
    return _noted or _asked_for.get() or len(world.current().hosted) == 1


@contextlib.contextmanager
def asked_for(only_first: bool = True) -> Iterator[None]:
    """A block that writes what the first rank has because the script asks for that (`xm.save(master_only=True)`). only_first: whether it does."""
    before = _asked_for.set(only_first)
    try:
        yield
    finally:
        _asked_for.reset(before)


def note(what: str, stacklevel: int = 3) -> None:
    """Say it, of a tensor in words. stacklevel: as for `warnings.warn`."""
    global _noted
    if noted():
        return
    _noted = True
    warnings.warn(
        f"a tensor ({what}) is saved as rank {world.first()} holds it: this process runs the script once for several ranks, so the "
        "other ranks' values are not in the file. neuronx_distributed's save_checkpoint keeps all of them; torchrun, with one process per rank, "
        "writes every rank's file.",
        stacklevel=stacklevel,
    )
