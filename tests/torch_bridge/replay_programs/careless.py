"""A player that is wrong on purpose: it plays the third call for ever, whatever state the forward reads. It shows which programs can fail.

It records calls of torch functions, so it needs no device and runs in eager torch.
"""

from __future__ import annotations

import types
import weakref
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

RECORDED = 3
"""The call of a kind that is recorded."""


class Careless:
    """Takes the place of a module's forward: calls of one kind (shapes, other arguments, training) are run three times, then played."""

    def __init__(self, module: torch.nn.Module):
        self._module = weakref.ref(module)
        self._plain = module.__dict__.get("forward") or types.MethodType(type(module).forward, module)
        self._calls: dict[Any, int] = {}
        self._recordings: dict[Any, Recording] = {}
        self.played = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        key = (str(spec), self._module().training, torch.is_grad_enabled(), tuple(map(_kind, leaves)))
        if key in self._recordings:
            self.played += 1
            return self._recordings[key].play(leaves)
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] < RECORDED:
            return self._plain(*args, **kwargs)
        recording = Recording(leaves)
        with recording:
            out = self._plain(*args, **kwargs)
        recording.finish(out)
        self._recordings[key] = recording
        return out


def _kind(leaf: Any) -> Any:
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else repr(leaf)


class Recording(TorchFunctionMode):
    """The torch functions that one call called."""

    def __init__(self, leaves: list[Any]):
        super().__init__()
        self._places: dict[int, Any] = {id(t): ("given", i) for i, t in enumerate(leaves) if isinstance(t, torch.Tensor)}
        self._calls: list[tuple[Any, list[Any], Any]] = []
        self._alive: list[Any] = [leaves]

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, spec = _pytree.tree_flatten((args, kwargs or {}))
        places = [self._place(x) for x in flat]
        out = func(*args, **(kwargs or {}))
        for j, x in enumerate(_pytree.tree_leaves(out)):
            if isinstance(x, torch.Tensor):
                self._places.setdefault(id(x), ("made", len(self._calls), j))
        self._alive.append((flat, out))
        self._calls.append((func, places, spec))
        return out

    def _place(self, x: Any) -> Any:
        return self._places.get(id(x), ("held", x)) if isinstance(x, torch.Tensor) else ("held", x)

    def finish(self, out: Any) -> None:
        """Take note of the result."""
        flat, self._spec = _pytree.tree_flatten(out)
        self._outs = [self._place(x) for x in flat]
        self._alive.clear()

    def play(self, leaves: list[Any]) -> Any:
        """Call the same functions, on other arguments."""
        made: list[list[Any]] = []

        def find(place: Any) -> Any:
            if place[0] == "held":
                return place[1]
            return leaves[place[1]] if place[0] == "given" else made[place[1]][place[2]]

        for func, places, spec in self._calls:
            args, kwargs = _pytree.tree_unflatten(list(map(find, places)), spec)
            made.append(_pytree.tree_leaves(func(*args, **kwargs)))
        return _pytree.tree_unflatten(list(map(find, self._outs)), self._spec)
