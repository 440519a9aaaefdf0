"""What decides what a module's forward does, in a form that can be compared: its parts, their Python attributes, and simple globals that their code reads."""

from __future__ import annotations

import functools
import pickle
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from operator import attrgetter, call, eq, is_, itemgetter
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from torch_bridge import code_reads, known_hooks, ranks
from torch_bridge.tensor import XLATensor
from torch_bridge.transfer import bits

_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NOT_STATE = frozenset(vars(torch.nn.Module())) - {"training"} | {"forward", "_is_full_backward_hook", "_non_persistent_buffers_set"}
_PARTS = frozenset({"_parameters", "_buffers", "_modules", "forward"})
_DEPTH = 4
_MANY = 256
_BYTES = 1 << 16


class Unknown(Exception):
    """Why nothing can be said. lasting: it will not be otherwise later."""

    def __init__(self, reason: str, lasting: bool = True):
        super().__init__(reason)
        self.lasting = lasting


class State:
    """What was found; equal ones mean that a forward does the same. Its hash is worked out once."""

    __slots__ = ("_hash", "found")

    def __init__(self, found: tuple[Any, ...]):
        self.found = found
        self._hash = hash(found)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, State) and self._hash == other._hash and self.found == other.found)


class Fingerprint:
    """Of one module. Compared are: the tree of modules with their modes; which objects parameters, buffers and other tensors are, and whether they need
    gradients; attributes, into lists, dicts and plain objects (configurations); what the code of the forwards reads (`code_reads`).
    """

    def __init__(self, module: torch.nn.Module):
        self._module = weakref.ref(module)
        self._globals: dict[type, list[code_reads.Place]] = {}
        self._last: _Walk | None = None

    def now(self) -> tuple[State, list[XLATensor]]:
        """(what to compare, the tensors that the module holds, each once). Raises Unknown for hooks inside and tensors that are not on xla."""
        if self._last is not None and self._last.untouched():
            return self._last.state, self._last.tensors
        root = self._module()
        assert root is not None
        walk = _Walk()
        walk.registered = {id(module) for module in root.modules()}
        for name, module in root.named_modules():
            if name:
                walk.hooks_of(name, [getattr(module, hooks) for hooks in _HOOKS])
            walk.add(name, (id(module), type(module)))
            for kind in (module._parameters, module._buffers):
                for key, t in kind.items():
                    walk.tensor(f"{name}.{key}", t)
            walk.watch(module.__dict__, _NOT_STATE - _PARTS)
            for held in (module._parameters, module._buffers, module._modules):
                walk.watch(held)
            for key, value in module.__dict__.items():
                if key not in _NOT_STATE:
                    walk.value(f"{name}.{key}", value, 0)
            forward = module.__dict__.get("forward")
            if forward is not None and not hasattr(forward, "fingerprint"):  # not one of `replay`
                walk.value(f"{name}.forward", forward, 0)
            walk.places(self._read_by(type(module)))
        walk.finish()
        walk.state = State(tuple(walk.found))
        self._last = walk
        return walk.state, walk.tensors

    def holds(self, x: Any) -> bool:
        """Whether an object was found in the module the last time."""
        return self._last is not None and (self._last.saw(x) or any(x is found for found, *_ in self._last.contents))

    def changed(self, before: State) -> str:
        """What is not as it was."""
        now = self.now()[0]
        for old, new in zip(before.found, now.found, strict=False):
            if old != new:
                return f"{str(new[0]).strip('.')}"
        return "what the module consists of"

    def _read_by(self, kind: type) -> list[code_reads.Place]:
        """Globals and the like that the forward of a class reads."""
        found = self._globals.get(kind)
        if found is None:
            found = self._globals[kind] = code_reads.of_class(kind)
        return found


class _Walk:
    """A walk through a module, and what to look at to know that another one would find the same.

    held, sizes: dicts and their lengths; dicts, getters, values: dicts, what takes entries out of each, and all those entries; gets, keys, found_there: how
    something else is asked for an entry, by which key, and what it gave; items: lists with what was in them; tensors, needs: tensors and whether they need
    gradients; hooks: what holds hooks of modules, and is empty; contents: (object, what reads it, what it read). registered: ids of the modules that are
    walked anyway.
    """

    def __init__(self) -> None:
        self.found: list[Any] = []
        self.tensors: list[XLATensor] = []
        self.state = State(())
        self.held: list[Any] = []
        self.sizes: list[int] = []
        self.dicts: list[dict[Any, Any]] = []
        self.getters: list[Callable[[Any], tuple[Any, ...]]] = []
        self.values: list[Any] = []
        self.gets: list[Callable[[Any, Any], Any]] = []
        self.keys: list[Any] = []
        self.found_there: list[Any] = []
        self.items: list[tuple[Any, tuple[Any, ...]]] = []
        self.needs: list[bool] = []
        self.hooks: list[Any] = []
        self._hooks_made = RemovableHandle.next_id
        self.contents: list[tuple[Any, Callable[[Any], Any], Any]] = []
        self.registered: set[int] = set()
        self._functions: set[int] = set()
        self._places: set[tuple[int, str]] = set()
        self._seen: dict[int, int] = {}
        self._entries: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}

    def saw(self, x: Any) -> bool:
        """Whether an object is one of those that were looked at."""
        return id(x) in self._seen

    def untouched(self) -> bool:
        """Whether everything is the very object that it was. Before every call of a module, over thousands of entries: loops without Python code in them."""
        return (
            all(map(eq, map(len, self.held), self.sizes))
            and self._same_entries()
            and all(map(eq, map(_NEEDS_GRAD, self.tensors), self.needs))
            and all(map(is_, map(call, self.gets, self.keys, repeat(_MISSING)), self.found_there))
            and all(_same_items(held, before) for held, before in self.items)
            and all(read(x) == before for x, read, before in self.contents)
            and self._without_hooks()
        )

    def _same_entries(self) -> bool:
        try:
            return all(map(is_, chain.from_iterable(map(call, self.getters, self.dicts)), self.values))
        except KeyError:
            return False

    def finish(self) -> None:
        """Put the entries of each dict together, when all have been seen."""
        for held, entries in self._entries.values():
            self.dicts.append(held)
            keys = list(entries)
            if len(keys) == 1:
                keys *= 2  # of one key alone an itemgetter gives no tuple
            self.getters.append(itemgetter(*keys))
            self.values += [entries[key] for key in keys]
        self._entries.clear()

    def _without_hooks(self) -> bool:
        """Whether there still are no other hooks inside. Looked at when a hook was registered anywhere since."""
        made = RemovableHandle.next_id
        if made != self._hooks_made:
            if any(self.hooks) or any(map(_TENSOR_HOOKS, self.tensors)):
                return False
            self._hooks_made = made
        return True

    def hooks_of(self, name: str, hooks: list[Any]) -> None:
        """Hooks of a module inside: there must be none but known ones, which must stay the same."""
        for held in hooks:
            if not known_hooks.all_known(held):
                raise Unknown(f"a hook on {name}", lasting=False)
            if held:
                self.watch(held)
                self.add(f"the hooks of {name}", tuple(map(_Same, held.values())))
            else:
                self.hooks.append(held)

    def watch(self, held: dict[Any, Any], leave_out: frozenset[str] = frozenset()) -> None:
        """Look at a dict's keys and values."""
        self.held.append(held)
        self.sizes.append(len(held))
        for key, value in dict.items(held):
            if key not in leave_out:
                self.entry(held, key, value)

    def entry(self, space: Any, key: Any, value: Any) -> None:
        """Look at what something has under a key."""
        if type(space) is dict:
            self._entries.setdefault(id(space), (space, {}))[1][key] = value
        else:  # a dict's class may have its own ways to read it
            self.gets.append(functools.partial(dict.get, space) if isinstance(space, dict) else space.get)
            self.keys.append(key)
            self.found_there.append(value)

    def places(self, places: Iterable[code_reads.Place]) -> None:
        """Values that code reads, such as globals."""
        for space, key in places:
            value = space.get(key)
            if (id(space), key) not in self._places:
                self._places.add((id(space), key))
                self.entry(space, key, value)
                self.value(f"what the code calls {key}", value, _DEPTH - 1)

    def add(self, label: str, what: Any) -> None:
        self.found.append((label, what))

    def tensor(self, label: str, t: torch.Tensor | None) -> None:
        if t is None:
            self.add(label, None)
            return
        if not isinstance(t, XLATensor):
            if t.device.type == "cpu" and t.layout is torch.strided and not t.requires_grad and t.nbytes <= _BYTES:
                self._contents(label, t, _tensor)
                return
            raise Unknown(f"a tensor on {t.device}, {label.strip('.')}", lasting=False)
        if t._backward_hooks:
            raise Unknown(f"a hook on the gradient of {label.strip('.')}", lasting=False)
        if id(t) not in self._seen:
            self._seen[id(t)] = len(self.tensors)
            self.tensors.append(t)
            self.needs.append(t.requires_grad)
            self.entry(t.__dict__, "_storage", t._storage)
            self.entry(t.__dict__, "_layout", t._layout)
        self.add(label, (id(t), id(t._storage), t._layout, t.requires_grad))

    def value(self, label: str, x: Any, depth: int) -> None:
        kind = type(x)
        if kind in _SIMPLE or isinstance(x, type):
            self.add(label, (kind, repr(x) if kind is float else x))
        elif isinstance(x, torch.Tensor):
            self.tensor(label, x)
        elif id(x) in self.registered or id(x) in self._seen:
            self.add(label, id(x))
        elif kind in _READERS:
            self._contents(label, x, _READERS[kind])
        elif hasattr(kind, "__next__"):
            raise Unknown(f"{label.strip('.')} is an iterator")
        elif isinstance(x, _CODE) or ranks.is_ranked(x) or depth >= _DEPTH:
            self.add(label, _Same(x))
            self._code(label, x, depth)
        else:
            self._seen[id(x)] = -1
            self._inside(label, x, depth)

    def _code(self, label: str, x: Any, depth: int) -> None:
        """What a function reads, and the object of a method."""
        if isinstance(x, types.MethodType) and depth < _DEPTH:
            self.value(f"{label}.__self__", x.__self__, depth + 1)
        if isinstance(x, (types.FunctionType, types.MethodType)) and id(x) not in self._functions:
            self._functions.add(id(x))
            self.places(code_reads.of_function(x))

    def _contents(self, label: str, x: Any, read: Callable[[Any], Any]) -> None:
        now = read(x)
        self.contents.append((x, read, now))
        self.add(label, (type(x), now))

    def _inside(self, label: str, x: Any, depth: int) -> None:
        items: Iterable[tuple[Any, Any]]
        if isinstance(x, (list, tuple, set, frozenset, deque)):
            if not isinstance(x, tuple):
                self.items.append((x, tuple(x)))
            items = enumerate(x)
        else:
            held = x if isinstance(x, dict) else getattr(x, "__dict__", {})
            self.watch(held)
            items = list(dict.items(held))
            if not isinstance(x, dict):
                if type(x).__new__ is not object.__new__ or not (held or _slots(type(x))):  # it may have a state that Python does not see
                    self.add(label, _Same(x))
                for name in _slots(type(x)):
                    self.entry(_Slots(x), name, getattr(x, name, None))
                    items.append((name, getattr(x, name, None)))
        count = 0
        for key, value in items:
            count += 1
            if count > _MANY and type(value) not in _SIMPLE:
                self.add(f"{label}.{key}", _Same(value))
            else:
                self.value(f"{label}.{key}", value, depth + 1)
        self.add(label, (type(x), len(x) if hasattr(x, "__len__") else count))


class _Same:
    """An object that is compared by identity, and kept, so that no other takes its address."""

    __slots__ = ("_held",)

    def __init__(self, held: Any):
        self._held = held

    def __hash__(self) -> int:
        return id(self._held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held


class _Slots:
    """Attributes in slots, to be read like a dict's."""

    __slots__ = ("_held",)

    def __init__(self, held: Any):
        self._held = held

    def get(self, key: Any, default: Any = None) -> Any:
        return getattr(self._held, key, default)


def _slots(kind: type) -> list[str]:
    """Names of attributes of a class that are not in `__dict__`."""
    names = [name for cls in kind.__mro__ for name in [vars(cls).get("__slots__", ())]]
    return [n for found in names for n in ((found,) if isinstance(found, str) else found) if n not in ("__dict__", "__weakref__")]


def _tensor(t: torch.Tensor) -> Any:
    return t.dtype, tuple(t.shape), bits(t)


def _array(x: np.ndarray) -> Any:
    if x.nbytes > _BYTES or x.dtype.hasobject:
        raise Unknown(f"a numpy array of {x.nbytes} bytes among its attributes; make it a buffer")
    return x.shape, x.dtype.str, x.tobytes()


_READERS: dict[type, Callable[[Any], Any]] = {
    np.ndarray: _array,
    bytearray: bytes,
    random.Random: random.Random.getstate,
    np.random.Generator: lambda x: pickle.dumps(x.bit_generator.state),
    np.random.RandomState: lambda x: pickle.dumps(x.get_state()),
    torch.Generator: lambda x: x.get_state().numpy().tobytes(),
}
"""How to read the contents of objects that have no attributes."""
_MISSING = object()
_NEEDS_GRAD = attrgetter("requires_grad")
_TENSOR_HOOKS = attrgetter("_backward_hooks")


def _same_items(held: Any, before: tuple[Any, ...]) -> bool:
    return len(held) == len(before) and all(a is b for a, b in zip(held, before, strict=True))
