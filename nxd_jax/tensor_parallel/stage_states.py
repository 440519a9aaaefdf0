"""State dicts of pipelines whose stages are with several ranks, in data that is written rank by rank: each rank's file has its own stages' part."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_bridge import nested

Split = Callable[[Mapping[str, Any]], list[dict[str, Any]]]
"""Makes of a state what each pipeline rank has of it. All processes call it."""

_known: dict[int, tuple[weakref.ref[Any], Split]] = {}
"""By the `id` of a state dict."""


def mark(state: Any, split: Split) -> Any:
    """The state dict, of which it is known from now on how it is split. (A copy of it is a dict like any other.)"""
    key = id(state)
    _known[key] = weakref.ref(state, lambda _: _known.pop(key, None)), split
    return state


def by_rank(data: Any) -> list[Any] | None:
    """For each pipeline rank what it has of nested data; None if that has no state of a pipeline."""
    found = nested.collect(data, _is_known)
    if not found:
        return None
    columns = [[_filled(state, part) for part in _known[id(state)][1](state)] for state in found]
    return [nested.replace(data, _is_known, [parts[k] for parts in columns]) for k in range(len(columns[0]))]


def _filled(state: Any, part: Mapping[str, Any]) -> Any:
    made = copy.copy(state)
    made.clear()
    made.update(part)
    return made


def parts(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """What each rank has of a state. names: of each rank's tensors. What is no tensor goes with its module, and to all ranks if none has that."""
    modules = [{name.rpartition(".")[0] for name in own} for own in names]
    known = set().union(*modules)
    others = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
    found = []
    for own, here in zip(names, modules, strict=True):
        of_modules = {key: v for key, v in others.items() if (parent := key.rpartition(".")[0]) in here or parent not in known}
        found.append({**{name: state[name] for name in own if name in state}, **of_modules})
    return found


def _is_known(x: object) -> bool:
    entry = _known.get(id(x))
    return entry is not None and entry[0]() is x
