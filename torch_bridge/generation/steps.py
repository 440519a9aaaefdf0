"""What a model does for one token, as a module of its own: its arguments are tensors alone, so that it can be played from recordings (`replay`)."""

from __future__ import annotations

import functools
import threading
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from torch_bridge.generation.callables import moved_to
from torch_bridge.generation.host_inputs import HostInputs
from torch_bridge.replay import direct, player, replay_policy

_LOCK = threading.RLock()
"""A step is brought up to date and called by one thread at a time."""
KEPT = 4
"""Kinds of caches (lengths, numbers of rows) whose recordings a model keeps."""
_PLAIN = (bool, int, float, str, type(None), torch.device, torch.dtype)
_NAME = "_torch_bridge_steps"


class TokenStep:
    """Mixed into a model's class (`_class_of`): the model, sharing all it holds, with a forward on a static cache that it puts together from tensors.

    It is no module around the model, as then the two would keep each other alive.
    """

    _torch_bridge_model: Any
    _torch_bridge_cache: _Described

    def forward(self, inputs: dict[str, Any], tensors: list[torch.Tensor]) -> dict[str, Any]:
        """What the model returns, without the cache, whose tensors it has changed in place. tensors: those of all layers, in order."""
        of = self._torch_bridge_cache
        layers, at = [], 0
        for kind, plain, names in of.layers:
            layer = object.__new__(kind)
            layer.__dict__.update(plain)
            for name in names:
                layer.__dict__[name] = tensors[at]
                at += 1
            layers.append(layer)
        cache = object.__new__(of.kind)
        cache.__dict__.update(of.rest)
        cache.layers = layers
        out = self._torch_bridge_model.forward(self, **inputs, **{of.name: cache})
        return {key: out[key] for key in out if key != of.name}


class _Described:
    """A static cache but for its tensors: all that are described alike fit. name: of the forward's argument for it."""

    def __init__(self, name: str, cache: Any):
        self.name = name
        self.kind = type(cache)
        self.rest = {k: x for k, x in vars(cache).items() if k != "layers"}
        self.layers = [(type(layer), _plain(layer), _tensors(layer)) for layer in cache.layers]


@functools.cache
def _class_of(kind: Any) -> Any:
    """It is called what the model's class is called: transformers finds by the name which of its layers' results can be collected."""
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_torch_bridge_model": kind}
    return types.new_class(kind.__name__, (TokenStep, kind), exec_body=lambda space: space.update(named))


def _made(model: Any, described: _Described) -> Any:
    kind: Any = type(model)
    step: Any = object.__new__(_class_of(kind))
    step.__dict__.update(_held(model), _torch_bridge_cache=described)
    return step


def _held(model: Any) -> dict[str, Any]:
    """What a model has, but for what plays it."""
    return {k: x for k, x in vars(model).items() if k not in ("forward", _NAME) and not isinstance(x, HostInputs)}


def _plain(layer: Any) -> dict[str, Any]:
    return {k: x for k, x in vars(layer).items() if not isinstance(x, torch.Tensor)}


def _tensors(layer: Any) -> list[str]:
    return [k for k, x in vars(layer).items() if isinstance(x, torch.Tensor)]


class _Steps:
    """Those of a model. They belong to it alone: a copy of it, or what is read from a file, has none."""

    def __init__(self) -> None:
        self.of: OrderedDict[Any, Any] = OrderedDict()

    def __deepcopy__(self, memo: object) -> _Steps:
        return _Steps()

    def __reduce__(self) -> Any:
        return _Steps, ()


class Token(NamedTuple):
    """What a model returned for a token, without the cache. direct: what does the same for further ones, if there is such a thing."""

    returned: dict[str, Any]
    direct: Direct | None


class Direct:
    """Tokens as calls of one program (`replay.direct`), on one cache, for inputs that differ in values only."""

    def __init__(self, call: direct.Direct, cache: Any, inputs: dict[str, Any]):
        self._call = call
        self._layers = [(vars(layer), [(k, x) for k, x in vars(layer).items() if isinstance(x, torch.Tensor)]) for layer in cache.layers]
        self._others, self._how = _parted(inputs)[1:]

    def token(self, inputs: dict[str, Any]) -> dict[str, Any] | None:
        """What the model returns; None, and nothing is done, if inputs or tensors of the cache are of another kind, or other ones."""
        tensors, others, how = _parted(inputs)
        if others != self._others or how != self._how or any(own[k] is not x for own, held in self._layers for k, x in held):
            return None
        found = self._call.call(tensors)
        return None if found is None else _on_host(found)


def play(model: Any, forward: Callable[..., Any], asked: bool, name: str, kwargs: dict[str, Any]) -> Token | None:
    """What `forward(**kwargs)` returns, once it has run. None, and nothing is done, if modules are not played, or this one's forward is not its class's.

    asked: the script has asked for the model to be played.
    """
    mode = replay_policy.said()
    if getattr(forward, "__func__", None) is not type(model).forward or not (asked or mode in (replay_policy.AUTO, replay_policy.ALL)):
        return None
    cache = kwargs[name]
    key = _key(cache)
    if key is None or not kwargs.get("return_dict"):
        return None
    steps = model.__dict__.setdefault(_NAME, _Steps()).of
    step = steps.get(key)
    if step is None:
        step = steps[key] = _made(model, _Described(name, cache))
        if asked:
            player.optimize(step)
        else:
            player.play_unasked(step, 0 if mode == replay_policy.ALL else player.WARM_UP)
        while len(steps) > KEPT:
            steps.popitem(last=False)
    steps.move_to_end(key)
    given = {k: x for k, x in kwargs.items() if k != name}
    inputs = moved_to(given, "xla")
    tensors = [vars(layer)[k].detach() for layer in cache.layers for k in _tensors(layer)]
    with _LOCK:
        own = {k: vars(step)[k] for k in ("forward", "_torch_bridge_cache") if k in vars(step)}
        step.__dict__.clear()
        step.__dict__.update(_held(model), **own)
        out, found = step.forward.at_once((inputs, tensors), _parted(inputs)[0])
    return Token(_on_host(out), None if found is None else Direct(found, cache, given))


def _parted(inputs: dict[str, Any]) -> tuple[list[Any], list[Any], Any]:
    """Tensors, what else there is, and how both are nested."""
    flat, how = _pytree.tree_flatten(inputs)
    are = [isinstance(x, torch.Tensor) for x in flat]
    others = [(type(x), repr(x) if type(x) is float else x) for x, is_tensor in zip(flat, are, strict=True) if not is_tensor]
    return [x for x, is_tensor in zip(flat, are, strict=True) if is_tensor], others, (how, are)


def _on_host(out: dict[str, Any]) -> dict[str, Any]:
    """The same with logits on the CPU, where the next token is chosen: a program with what takes them there would be another."""
    return {k: x.cpu() if k == "logits" and isinstance(x, torch.Tensor) else x for k, x in out.items()}


def _key(cache: Any) -> Any:
    """What caches have in common that a step fits; None for one with something in it that cannot be compared."""
    rest = {k: x for k, x in vars(cache).items() if k != "layers"}
    parts = [(type(layer), tuple(sorted(_plain(layer).items())), tuple(_tensors(layer))) for layer in cache.layers]
    plain = [*rest.values(), *(x for _, items, _ in parts for _, x in items)]
    return (tuple(sorted(rest.items())), *parts) if all(type(x) in _PLAIN for x in plain) else None
