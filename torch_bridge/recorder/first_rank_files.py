"""The warning, once, that a file holds the first hosted rank's values of what differs by rank."""

from __future__ import annotations

import warnings

from torch_bridge.mesh import world

_noted = False


def noted() -> bool:
    """Whether it has been said, or need not be: this process hosts one rank."""
    return _noted or len(world.current().hosted) == 1


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
