"""Attributes of modules whose forward was run on tensors without values: none of these stays behind."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_bridge.recorder.tensor import XLATensor

_OWN = ("_parameters", "_buffers", "_modules")
"""Dicts of a module that others look after."""


@contextlib.contextmanager
def kept(module: torch.nn.Module) -> Iterator[None]:
    """A block behind which modules have no tensors without values among their attributes, nor in lists and dicts there, and have the tensors that they had.

    Where one was put, as a cache, all attributes are again what they were: a number that says what is in the cache is, too. A warning names replaced tensors.
    """
    modules = dict(module.named_modules())
    before = {name: {k: x for k, x in vars(m).items() if k not in _OWN} for name, m in modules.items()}
    undo = [again for own in before.values() for x in own.values() for again in _containers(x)]
    replaced: list[str] = []
    try:
        yield
    finally:
        cached = sum(again() for again in undo) > 0  # every one of them
        for name, m in modules.items():
            cached = _restore_tensors(name, m, before[name], replaced) or cached
        if cached:
            for name, m in modules.items():
                _restore(m, before[name])
    if replaced:
        warnings.warn(
            f"forward assigns {', '.join(replaced)} anew, and the traced model has the value of the trace in every call: make it a buffer "
            "(register_buffer), which is kept from call to call",
            stacklevel=2,
        )


def _restore_tensors(name: str, m: torch.nn.Module, before: dict[str, Any], replaced: list[str]) -> bool:
    """Whether the module had tensors without values, which are gone now."""
    new = {k: x for k, x in vars(m).items() if k not in _OWN and isinstance(x, torch.Tensor) and before.get(k) is not x}
    for key, value in new.items():
        if key in before and (isinstance(before[key], torch.Tensor) or isinstance(value, XLATensor)):
            vars(m)[key] = before[key]
        elif isinstance(value, XLATensor):
            del vars(m)[key]
    computed = {
        name for hook in m._forward_pre_hooks.values() for name in (getattr(hook, "name", None), getattr(hook, "_tensor_name", None))
    }
    replaced += [f"{name}.{key}".lstrip(".") for key in new.keys() - computed if isinstance(before.get(key), torch.Tensor)]
    return any(isinstance(x, XLATensor) for x in new.values())


def _restore(m: torch.nn.Module, before: dict[str, Any]) -> None:
    own = vars(m)
    for key in [k for k in own if k not in _OWN and k not in before]:
        del own[key]
    own.update(before)


def _containers(x: Any, seen: set[int] | None = None) -> Iterator[Callable[[], bool]]:
    """For a list or dict, and those in it: a function that gives it its content again if tensors without values were put there, and says whether."""
    seen = set() if seen is None else seen
    if type(x) not in (list, dict, OrderedDict, deque, set) or id(x) in seen:
        return
    seen.add(id(x))
    content = dict(x) if isinstance(x, dict) else list(x)
    items = list(content.values() if isinstance(content, dict) else content)
    before = set(map(id, items))

    def again() -> bool:
        now = x.values() if isinstance(x, dict) else x
        if not any(_holds(y) for y in now if id(y) not in before):
            return False
        x.clear()
        (x.extend if isinstance(x, (list, deque)) else x.update)(content)
        return True

    yield again
    for y in items:
        yield from _containers(y, seen)


def _holds(x: object) -> bool:
    """Whether there are tensors without values."""
    if isinstance(x, (list, tuple, deque, set)):
        return any(map(_holds, x))
    if isinstance(x, dict):
        return any(map(_holds, x.values()))
    return isinstance(x, XLATensor)
