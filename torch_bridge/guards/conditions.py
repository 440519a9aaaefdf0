"""What has to be as it was for a forward to do what it did: the places that it read, with what it found there.

Collected by an `Observer` while the forward runs; `hold` is asked before every call that is played, over thousands of places, so it loops in C.
"""

from __future__ import annotations

import collections
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from operator import attrgetter, call, contains, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_bridge.guards.values import alike, shown, unchanging
from torch_bridge.identity import ONCE, references, same

if TYPE_CHECKING:
    import torch

HEAP = 1 << 9
"""Of `__flags__` of classes that Python code made."""
MISSING: Any = type("MISSING", (), {"__repr__": lambda self: "nothing"})()
_CODE, _DEFAULTS, _KWDEFAULTS, _MRO, _NEEDS_GRAD, _HOOKS = map(
    attrgetter, ("__code__", "__defaults__", "__kwdefaults__", "__mro__", "requires_grad", "_backward_hooks")
)


_VARS = object.__getattribute__
"""The `__dict__` of an object, whatever its class makes of attributes."""


class _Cell:
    """A variable of an enclosing function."""

    __slots__ = ("cell",)

    def __init__(self, cell: types.CellType):
        self.cell = cell

    def __call__(self) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # not assigned yet
            return MISSING


class Question(NamedTuple):
    """Something that is asked again by calling it. known: what it said; label: what it is, for messages."""

    ask: Callable[..., Any]
    args: tuple[Any, ...]
    known: Any
    label: str


class Conditions:
    """Places and what was found there.

    Of dicts: entries, and keys that are not there. Of classes: what a name is in each class of a method resolution order. Of objects: their classes and their
    `__dict__`s. Of functions: code and defaults. Of lists, sets, deques: all elements. Of tensors: whether they need gradients, and that they have no hooks.
    Questions are asked again. empty: containers with nothing in them. root: an object that is not kept alive.
    """

    def __init__(self, root: Any = None) -> None:
        self._root = (lambda: None) if root is None else weakref.ref(root)
        self._root_is: Any = None
        self._entries: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}
        self._labels: dict[tuple[int, Any], str] = {}
        self._absent: dict[tuple[int, Any], tuple[Any, Any]] = {}
        self._classes: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self._orders: dict[type, Any] = {}
        self._objects: dict[int, Any] = {}
        self._functions: dict[int, Any] = {}
        self._cells: dict[int, tuple[_Cell, Any]] = {}
        self._sequences: dict[int, tuple[Any, tuple[Any, ...], str]] = {}
        self._questions: list[Question] = []
        self._asked: set[Any] = set()
        self._empty: dict[int, tuple[Any, str]] = {}
        self._tensors: dict[int, Any] = {}
        self._ready = False

    # -- noting ---------------------------------------------------------------------------------------

    def entry(self, space: dict[Any, Any], key: Any, value: Any, label: str) -> None:
        """A dict has this under a key; MISSING: it has no such key. `dict`'s own way of reading counts, whatever its class does."""
        if type(space) is not dict:  # its class may have its own ways to read it
            self.question(dict.get, (space, key, MISSING), value, label)
        elif value is MISSING:
            self._absent.setdefault((id(space), key), (space, key))
        else:
            self._entries.setdefault(id(space), (space, {}))[1].setdefault(key, value)
        self._labels.setdefault((id(space), key), label)

    def class_entry(self, cls: type, name: str, value: Any) -> None:
        """A class itself, not those above it, has this under a name (or MISSING)."""
        self._classes.setdefault((id(cls), name), (cls, name, value))

    def order(self, cls: type) -> None:
        """A class keeps the classes above it."""
        self._orders.setdefault(cls, cls.__mro__)

    def object(self, x: Any) -> None:
        """An object keeps its class and its `__dict__`."""
        if not type(x).__flags__ & HEAP:  # the class of a tuple or a dict cannot be set
            return
        if x is self._root():
            self._root_is = type(x), _VARS(x, "__dict__")
            return
        self._objects.setdefault(id(x), x)

    def function(self, f: Any) -> None:
        """A function keeps its code and its defaults."""
        self._functions.setdefault(id(f), f)

    def cell(self, cell: types.CellType) -> None:
        """A variable of an enclosing function keeps its value."""
        if id(cell) not in self._cells:
            reader = _Cell(cell)
            self._cells[id(cell)] = reader, reader()

    def elements(self, x: Any, label: str) -> None:
        """A list, set, deque or dict keeps its elements (of a dict: keys, in order, and values)."""
        if not len(x):
            self._empty.setdefault(id(x), (x, label))
        elif isinstance(x, dict):
            self.question(_items, (x,), _items(x), label)
        else:
            self._sequences.setdefault(id(x), (x, tuple(x), label))

    def question(self, ask: Callable[..., Any], args: tuple[Any, ...], known: Any, label: str) -> None:
        """Asked again, it says the same."""
        key = (ask, *map(id, args))
        if key not in self._asked:
            self._asked.add(key)
            self._questions.append(Question(ask, args, known, label))

    def tensor(self, t: torch.Tensor) -> None:
        """A tensor goes on needing a gradient or not, and has no hooks."""
        self._tensors.setdefault(id(t), t)

    def has_tensor(self, t: torch.Tensor) -> bool:
        """Whether it is one of the tensors that were read."""
        return id(t) in self._tensors

    @property
    def tensors(self) -> list[Any]:
        """Tensors on xla that were read."""
        return list(self._tensors.values())

    def __len__(self) -> int:
        entries = sum(len(found) for _, found in self._entries.values())
        others: tuple[Any, ...] = (
            self._absent,
            self._classes,
            self._objects,
            self._functions,
            self._cells,
            self._sequences,
            self._questions,
            self._empty,
        )
        return entries + sum(map(len, others)) + len(self._tensors)

    def prune(self) -> None:
        """Let go of objects that nobody else holds: what a run made and left cannot be met again, and may hold tensors."""
        while True:
            gone = []
            for held in (self._sequences, self._empty):
                counts = references([x for x, *_ in held.values()])
                gone += [
                    (held, k) for k, count in zip(list(held), counts, strict=True) if count <= ONCE + 1
                ]  # the list's, and that of the entry
            gone += [(self._objects, k) for k in list(self._objects) if sys.getrefcount(self._objects[k]) <= 2]
            if not gone:
                return
            for held, k in gone:
                del held[k]

    def freeze(self) -> None:
        """Lay it out for `hold`: nothing is noted from now on."""
        self._dicts: list[Any] = []
        self._getters: list[Any] = []
        self._values: list[Any] = []
        self._places: list[tuple[Any, Any]] = []
        for space, found in self._entries.values():
            keys = list(found)
            self._places += [(space, key) for key in keys]
            self._values += found.values()
            self._dicts.append(space)
            self._getters.append(itemgetter(*(keys * 2 if len(keys) == 1 else keys)))
            if len(keys) == 1:  # of one key alone an itemgetter gives no tuple
                self._values.append(self._values[-1])
                self._places.append(self._places[-1])
        self._absent_in, self._absent_keys = _columns(self._absent.values(), 2)
        classes, self._names, self._found = _columns(self._classes.values(), 3)
        self._gets = [vars(cls).get for cls in classes]
        self._ordered, self._mros = list(self._orders), list(self._orders.values())
        objects = list(self._objects.values())
        self._with_class, self._class_of = objects, [*map(type, objects)]
        self._with_dict = [x for x in objects if type(x).__dictoffset__]
        self._dict_of = [*map(_VARS, self._with_dict, repeat("__dict__"))]
        self._code_of = list(self._functions.values())
        self._codes = [(*map(get, self._code_of),) for get in (_CODE, _DEFAULTS, _KWDEFAULTS)]
        self._cell_readers = [reader for reader, _ in self._cells.values()]
        self._cell_values = [value for _, value in self._cells.values()]
        self._empties = [x for x, _ in self._empty.values()]
        self._tensor_list = self.tensors
        self._needs = [*map(_NEEDS_GRAD, self._tensor_list)]
        self._ready = True

    # -- asking ---------------------------------------------------------------------------------------

    def hold(self) -> bool:
        """Whether everything is as it was."""
        if not self._ready:
            self.freeze()
        return self._same_objects() and self._same_entries() and self._same_rest()

    def _same_objects(self) -> bool:
        return (
            self._same_root()
            and same(map(type, self._with_class), self._class_of)
            and same(map(_MRO, self._ordered), self._mros)
            and same(map(_VARS, self._with_dict, repeat("__dict__")), self._dict_of)
            and (same(map(call, self._gets, self._names, repeat(MISSING)), self._found) or self._alike_in_classes())
            and all(same(map(get, self._code_of), known) for get, known in zip(_FUNCTION, self._codes, strict=True))
            and same(map(_NEEDS_GRAD, self._tensor_list), self._needs)
            and not any(map(_HOOKS, self._tensor_list))
        )

    def _same_root(self) -> bool:
        root = self._root()
        return self._root_is is None or (type(root) is self._root_is[0] and _VARS(root, "__dict__") is self._root_is[1])

    def _alike_in_classes(self) -> bool:
        now = [*map(call, self._gets, self._names, repeat(MISSING))]
        if not all(map(alike, self._found, now)):
            return False
        self._found = [new if unchanging(new) else old for old, new in zip(self._found, now, strict=True)]
        return True

    def _same_entries(self) -> bool:
        try:
            if same(chain.from_iterable(map(call, self._getters, self._dicts)), self._values):
                return not any(map(contains, self._absent_in, self._absent_keys))
        except KeyError:
            return False
        for k, (space, key) in enumerate(self._places):  # another object may be an equal number
            now = space[key]
            if not alike(self._values[k], now):
                return False
            if unchanging(now):  # a tensor, also in a tuple, may be written
                self._values[k] = now
        return not any(map(contains, self._absent_in, self._absent_keys))

    def _same_rest(self) -> bool:
        return (
            not any(self._empties)
            and all(map(_still, map(call, self._cell_readers), self._cell_values))
            and all(len(x) == len(known) and all(map(_still, x, known)) for x, known, _ in self._sequences.values())
            and all(_still(q.ask(*q.args), q.known) for q in self._questions)
        )

    # -- saying why not -------------------------------------------------------------------------------

    def changed(self) -> str:
        """What is not as it was, in words; "" if everything is."""
        return next(self._changes(), "")

    def _changes(self) -> Iterator[str]:
        if not self._ready:
            self.freeze()
        if not self._same_root():
            yield "the class or the __dict__ of the module"
        for x, kind in zip(self._with_class, self._class_of, strict=True):
            if type(x) is not kind:
                yield f"the class of an object, which was {kind.__name__}"
        for x, held in zip(self._with_dict, self._dict_of, strict=True):
            if _VARS(x, "__dict__") is not held:
                yield f"the __dict__ of a {type(x).__name__}"
        for cls, mro in self._orders.items():
            if cls.__mro__ is not mro:
                yield f"the bases of {cls.__name__}"
        for cls, name, value in self._classes.values():
            if not alike(value, vars(cls).get(name, MISSING)):
                yield f"{cls.__name__}.{name}"
        for (space, key), value in zip(self._places, self._values, strict=True):
            now = dict.get(space, key, MISSING)
            if not alike(value, now):
                yield f"{self._labels[id(space), key]} (was {_shown(value)}, is {_shown(now)})"
        for space, key in self._absent.values():
            if key in space:
                yield f"{self._labels[id(space), key]} (was not there)"
        for f, codes in zip(self._code_of, zip(*self._codes, strict=True), strict=True):
            if any(get(f) is not known for get, known in zip(_FUNCTION, codes, strict=True)):
                yield f"the code or the defaults of {f.__qualname__}"
        for reader, value in zip(self._cell_readers, self._cell_values, strict=True):
            if not _still(reader(), value):
                yield f"a variable of an enclosing function (was {_shown(value)}, is {_shown(reader())})"
        for x, label in self._empty.values():
            if x:
                yield f"{label} (was empty)"
        for x, known, label in self._sequences.values():
            if len(x) != len(known) or not all(map(_still, x, known)):
                yield label
        for q in self._questions:
            if not _still(q.ask(*q.args), q.known):
                yield q.label
        for t, needs in zip(self._tensor_list, self._needs, strict=True):
            if t.requires_grad is not needs or t._backward_hooks:
                yield f"whether a tensor of shape {list(t.shape)} needs a gradient, or its hooks"


_FUNCTION = (_CODE, _DEFAULTS, _KWDEFAULTS)


def _shown(x: object) -> str:
    return "nothing" if x is MISSING else shown(x)


def _still(now: object, known: Any) -> bool:
    return now is known or alike(known, now)


def _items(x: dict[Any, Any]) -> tuple[Any, ...]:
    return tuple(chain.from_iterable(x.items() if type(x) is collections.OrderedDict else dict.items(x)))


def _columns(rows: Iterable[tuple[Any, ...]], width: int) -> list[list[Any]]:
    found = [list(column) for column in zip(*rows, strict=True)]
    return found or [[] for _ in range(width)]
