"""A module that is called with other tensors in the places of its parameters and buffers, and is left as it was.

`torch.func.functional_call` is no help where a module has another under two names: it puts the wrong tensors back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


class Places:
    """Where a module has parameters and buffers, under all their names. stand_ins: by the id of a parameter or buffer."""

    def __init__(self, module: torch.nn.Module, stand_ins: Mapping[int, torch.Tensor]):
        self.stand_ins = stand_ins
        self.modules = [m for m in module.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self.held: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (own, dict(own)) for m in self.modules for own in (m._parameters, m._buffers)
        ]

    def set(self) -> None:
        """Put the stand-ins there."""
        for own, before in self.held:
            own.update({key: self.stand_ins[id(t)] for key, t in before.items() if t is not None})

    def restore(self) -> None:
        """Put there what was there."""
        for own, before in self.held:
            own.clear()
            own.update(before)

    def now(self) -> dict[int, list[Any]]:
        """What is there now in the places of each parameter or buffer, by its id: as often as the module has it."""
        found: dict[int, list[Any]] = {}
        for own, before in self.held:
            for key, t in before.items():
                if t is not None:
                    found.setdefault(id(t), []).append(own.get(key))
        return found


@contextlib.contextmanager
def replaced(module: torch.nn.Module, named: Mapping[str, torch.Tensor], stand_ins: Mapping[str, torch.Tensor]) -> Iterator[dict[str, Any]]:
    """A block in which the module has stand-ins. Gives a dict that holds at its end what the module has then, by name.

    named: its parameters and buffers, each by its first name. Raises ValueError for one that the module has several times, and not the same everywhere then.
    """
    places = Places(module, {id(t): stand_ins[name] for name, t in named.items()})
    found: dict[str, Any] = {}
    places.set()
    try:
        yield found
        now = places.now()
        for name, t in named.items():
            found[name] = _one(name, now[id(t)])
    finally:
        places.restore()


def _one(name: str, now: Sequence[Any]) -> Any:
    if any(t is not now[0] for t in now):
        raise ValueError(
            f"the module has {name} under several names, and the forward sets one of them anew: update it in place (copy_), or give each its own tensor"
        )
    return now[0]
