"""What a module returns, taken apart into tensors and the rest, and put together anew for each call that is played.

Beyond what torch's pytree knows, that is the caches of keys and values that transformers' decoders return unless `use_cache=False`: objects made in the call,
of plain attributes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from torch_bridge.runtime.transfer import bits

OBJECTS = ("transformers.cache_utils",)
"""Modules whose objects are taken apart."""


class Place(NamedTuple):
    """In what a module returns: the place of one of its tensors."""

    number: int


class Given(NamedTuple):
    """The same for a tensor that the module was given, or holds, and returns as it is: its place among those."""

    number: int


@dataclasses.dataclass(frozen=True)
class OnHost:
    """A CPU tensor that the module makes anew in every call; what is returned is a copy of it."""

    what: tuple[Any, ...]
    tensor: torch.Tensor = dataclasses.field(compare=False)


class Built(NamedTuple):
    """An object, a list, a tuple or a dict with others inside. kind: its class; names: of its attributes, or its keys."""

    kind: type
    names: tuple[Any, ...]
    parts: tuple[Any, ...]


class Parts(NamedTuple):
    """tensors: each once; rest, how: all of it, flat, with their places, and its nesting; opened: the objects that were taken apart or copied, by id."""

    tensors: list[Any]
    rest: list[Any]
    how: Any
    opened: dict[int, Any]


_TENSORS = (Place, Given, OnHost)
_PLAIN = (bool, int, float, str, type(None))
_PLAIN_INSIDE = (*_PLAIN, torch.dtype, torch.device)


def taken_apart(out: object, given: Mapping[int, int]) -> Parts:
    """What a module returned. given: places of the tensors that it was given or holds, by id."""
    flat, how = _pytree.tree_flatten(out)
    tensors: dict[int, tuple[int, torch.Tensor]] = {}
    opened: dict[int, Any] = {}
    rest = [_described(x, False, given, tensors, opened) for x in flat]
    return Parts([t for _, t in tensors.values()], rest, how, opened)


def _described(
    x: object, inside: bool, given: Mapping[int, int], tensors: dict[int, tuple[int, torch.Tensor]], opened: dict[int, Any]
) -> Any:
    """tensors: by id, their places and themselves; opened: what was taken apart. (A function in a function that calls itself would keep the tensors.)"""
    if isinstance(x, torch.Tensor):
        if id(x) in given:
            return Given(given[id(x)])
        if type(x) is torch.Tensor and x.device.type == "cpu" and x.layout is torch.strided and not x.requires_grad:
            if id(x) in opened:  # see below
                return x
            opened[id(x)] = x
            return OnHost((x.dtype, tuple(x.shape), x.stride(), bits(x)), x.clone())
        return Place(tensors.setdefault(id(x), (len(tensors), x))[0])
    found = _opened(x, inside)
    if found is None or id(x) in opened:  # an object that is there twice stays one: it is not taken apart, and so nothing is played
        return x
    opened[id(x)] = x
    names, parts = found
    return Built(type(x), tuple(names), tuple([_described(part, True, given, tensors, opened) for part in parts]))


def put_together(tensors: Sequence[Any], given: Sequence[Any], rest: Sequence[Any], how: Any) -> Any:
    """The same with other tensors in their places, and of those that were given or are held."""
    return _pytree.tree_unflatten([_made(x, tensors, given) for x in rest], how)


def unknown(rest: Sequence[Any]) -> type | None:
    """The class of something that could not be taken apart, if there is one."""
    return next(_unknown(rest, inside=False), None)


def gives_back(rest: Sequence[Any]) -> bool:
    """Whether a tensor that the module was given, or holds, is in what it returns."""
    return any(type(x) is Given or (type(x) is Built and gives_back(x.parts)) for x in rest)


def _opened(x: Any, inside: bool) -> tuple[Any, Any] | None:
    """The names and values of its parts; None for what stays as it is."""
    kind = type(x)
    if (
        any(c.__module__ in OBJECTS for c in kind.__mro__)
        and kind is not type
        and not isinstance(x, (type, torch.nn.Module))
        and hasattr(x, "__dict__")
    ):
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
        elif type(x) not in (_PLAIN_INSIDE if inside else _PLAIN) and type(x) not in _TENSORS and not (inside and isinstance(x, type)):
            yield type(x)


def _made(x: Any, tensors: Sequence[Any], given: Sequence[Any]) -> Any:
    kind = type(x)
    if kind is Place:
        return tensors[x.number]
    if kind is Given:
        return given[x.number]
    if kind is OnHost:
        return x.tensor.clone()
    if kind is not Built:
        return x
    parts = [_made(part, tensors, given) for part in x.parts]
    if x.kind in (list, tuple):
        return x.kind(parts)
    named = dict(zip(x.names, parts, strict=True))
    if x.kind is dict:
        return named
    made = object.__new__(x.kind)
    made.__dict__.update(named)
    return made
