"""An optimizer's groups that were looked at in an earlier step: whether they still are what they were, and their step counters in one piece of memory.

A model has hundreds of parameters with several states each, and looking at every one in Python takes longer than recording the step. What was found is noted
(`Known`), and compared by loops without Python code in them. Nothing on xla is kept alive by the notes.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import attrgetter, call, eq
from typing import Any

import numpy as np
import torch

from torch_bridge.identity import same
from torch_bridge.recorder.tensor import XLATensor

_GRAD, _LAYOUT, _STORAGE = map(attrgetter, ("grad", "_layout", "_storage"))
_ADDRESS = torch.Tensor.data_ptr

Group = Mapping[str, Any]
Looked = tuple[list[Any], list[Any], list[list[Any]], list[torch.Tensor]]
"""A group's parameters, their gradients, their states by name, and their step counters."""


class Counters:
    """Step counters, moved next to each other: they stay the tensors that they are, and are counted together."""

    def __init__(self, steps: Sequence[torch.Tensor]):
        self.steps = list(steps)
        together = torch.stack(self.steps)
        for k, step in enumerate(self.steps):
            step.set_(together.untyped_storage(), k, (), ())
        self._values: np.ndarray = together.numpy()
        self._addresses = list(map(_ADDRESS, self.steps))

    @staticmethod
    def possible(steps: Sequence[torch.Tensor]) -> bool:
        """Whether they are plain floats of one dtype."""
        return len({s.dtype for s in steps}) == 1 and all(s.dim() == 0 and not s.requires_grad and s.is_floating_point() for s in steps)

    def there(self) -> bool:
        """Whether nobody has given one of them other memory."""
        return all(map(eq, map(_ADDRESS, self.steps), self._addresses))

    def count(self) -> list[float]:
        """Add 1 to each; what they are then."""
        self._values += 1
        found: list[float] = self._values.tolist()
        return found

    def next(self) -> float | None:
        """What `count` would give for all of them; None if they differ."""
        found: list[float] = (self._values + 1).tolist()
        return found[0] if found.count(found[0]) == len(found) else None


class Known:
    """What a group was when it was last looked at in full: parameters that all have gradients, and states that are tensors on xla, each its own memory.

    names: of the states. counters: None for classes that do not count. times: how often notes were made of this group, these included.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: tuple[str, ...], looked: Looked, times: int):
        params, grads, columns, steps = looked
        written = [t for given in (params, *columns) for t in given]
        self.names, self.times = names, times
        self.counters = Counters(steps) if steps else None
        self._params = list(map(id, params))
        places = {id(p): k for k, p in enumerate(optimizer.state)} if names else {}
        self._places = [places[id(p)] for p in params] if names else []
        self._layouts = list(map(_LAYOUT, (*written, *grads)))
        self._storages = [weakref.ref(t._storage) for t in written]
        self._ids = frozenset(id(t._storage) for t in written)

    @staticmethod
    def possible(group: Group, looked: Looked) -> bool:
        """Whether a group that the rules compute is one to take note of."""
        params, _, columns, steps = looked
        return (
            0 < len(params) == len(group["params"])
            and not any(t is None for column in columns for t in column)
            and (not steps or Counters.possible(steps))
        )

    def look(self, optimizer: torch.optim.Optimizer, group: Group) -> Looked | None:
        """The group as it is now; None if it is not what it was."""
        params = group["params"]
        if len(params) != len(self._params) or not all(map(eq, map(id, params), self._params)):
            return None
        grads = list(map(_GRAD, params))
        held = list(optimizer.state.values()) if self.names else []
        if not set(map(type, grads)) <= _XLA or (self._places and max(self._places) >= len(held)):
            return None
        own = [held[k] for k in self._places]
        columns = [list(map(dict.get, own, repeat(name))) for name in self.names]
        steps = [] if self.counters is None else self.counters.steps
        written = [t for given in (params, *columns) for t in given]
        if not set(map(type, written)) <= _XLA:
            return None
        known = (
            same(map(_STORAGE, written), map(call, self._storages))
            and same(map(_LAYOUT, (*written, *grads)), self._layouts)
            and self._ids.isdisjoint(map(id, map(_STORAGE, grads)))
            and (self.counters is None or (same(map(dict.get, own, repeat("step")), steps) and self.counters.there()))
        )
        return (params, grads, columns, steps) if known else None


_XLA = {XLATensor}
