"""What a module returns, taken apart into tensors and the rest, and put together anew for each call that is played.

Beyond what torch's pytree knows, that is the caches of keys and values that transformers' decoders return unless `use_cache=False`: objects made in the call,
of plain attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

OBJECTS = ("transformers.cache_utils",)
"""Modules whose objects are taken apart."""


class Place(NamedTuple):
    """In what a module returns: the place of one of its tensors."""

    number: int


class Built(NamedTuple):
    """An object, a list, a tuple or a dict with others inside. kind: its class; names: of its attributes, or its keys."""

    kind: type
    names: tuple[Any, ...]
    parts: tuple[Any, ...]


class Parts(NamedTuple):
    """tensors: each once; rest, how: all of it, flat, with their places, and its nesting; opened: the objects that were taken apart, by id."""

    tensors: list[Any]
    rest: list[Any]
    how: Any
    opened: dict[int, Any]


_PLAIN = (bool, int, float, str, type(None))
_PLAIN_INSIDE = (*_PLAIN, torch.dtype, torch.device)


def taken_apart(out: Any) -> Parts:
    """What a module returned."""
    flat, how = _pytree.tree_flatten(out)
    tensors: dict[int, tuple[int, torch.Tensor]] = {}
    opened: dict[int, Any] = {}
    rest = [_described(x, False, tensors, opened) for x in flat]
    return Parts([t for _, t in tensors.values()], rest, how, opened)


def _described(x: Any, inside: bool, tensors: dict[int, tuple[int, torch.Tensor]], opened: dict[int, Any]) -> Any:
    """tensors: by id, their places and themselves; opened: what was taken apart. (A function in a function that calls itself would keep the tensors.)"""
    if isinstance(x, torch.Tensor):
        return Place(tensors.setdefault(id(x), (len(tensors), x))[0])
    found = _opened(x, inside)
    if found is None or id(x) in opened:  # an object that is there twice stays one: it is not taken apart, and so nothing is played
        return x
    opened[id(x)] = x
    names, parts = found
    return Built(type(x), tuple(names), tuple([_described(part, True, tensors, opened) for part in parts]))


def put_together(tensors: Sequence[Any], rest: Sequence[Any], how: Any) -> Any:
    """The same with other tensors in their places."""
    return _pytree.tree_unflatten([_made(x, tensors) for x in rest], how)


def unknown(rest: Sequence[Any]) -> type | None:
    """The class of something that could not be taken apart, if there is one."""
    return next(_unknown(rest, inside=False), None)


def _opened(x: Any, inside: bool) -> tuple[Any, Any] | None:
    """The names and values of its parts; None for what stays as it is."""
    kind = type(x)
    if kind.__module__ in OBJECTS and kind is not type and not isinstance(x, (type, torch.nn.Module)) and hasattr(x, "__dict__"):
        return list(x.__dict__), list(x.__dict__.values())
    if inside and kind in (list, tuple):
        return (), x
    if inside and kind is dict:
        return list(x), list(x.values())
    return None


def _unknown(rest: Sequence[Any], inside: bool) -> Iterator[type]:
    for x in rest:
        if type(x) is Built:
            yield from _unknown(x.parts, inside=True)
        elif type(x) not in (_PLAIN_INSIDE if inside else _PLAIN) and type(x) is not Place and not (inside and isinstance(x, type)):
            yield type(x)


def _made(x: Any, tensors: Sequence[Any]) -> Any:
    kind = type(x)
    if kind is Place:
        return tensors[x.number]
    if kind is not Built:
        return x
    parts = [_made(part, tensors) for part in x.parts]
    if x.kind in (list, tuple):
        return x.kind(parts)
    named = dict(zip(x.names, parts, strict=True))
    if x.kind is dict:
        return named
    made = object.__new__(x.kind)
    made.__dict__.update(named)
    return made
