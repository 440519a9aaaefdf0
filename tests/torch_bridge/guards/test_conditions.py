"""What a function reads is a condition: it holds until the place changes, says which place that is, and holds again when it is as it was."""

from __future__ import annotations

import collections
import contextvars
import functools
import os
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.torch_bridge.guards.watching import watched
from torch_bridge.guards.values import alike

SCALE: Any = 1
OTHER: Any = 1
TABLE = torch.tensor([1.0, 2.0])
_VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("_VARIABLE")
_SETTINGS = types.ModuleType("settings")
_NAN = float("nan")


class Parent:
    """Has what its children find."""

    inherited: Any = 1
    table = torch.tensor([1.0])


class Thing(Parent):
    """An object of a script's."""

    shared: Any = 1
    __slots__ = ("slot",)

    def __init__(self) -> None:
        self.value: Any = 1
        self.unrelated: Any = 1
        self.items: list[Any] = [1, 2]
        self.pairs: dict[Any, Any] = {"a": 1, "b": 2}
        self.nothing: Any = None
        self.slot = 1
        self.array = np.array([1.0, 2.0])
        self.tensor = torch.tensor([1.0, 2.0])
        self.tuple: Any = (1, torch.tensor([1.0]))
        self.part = functools.partial(_add, 1)
        self.queue = collections.deque([1])
        self.ordered = collections.OrderedDict(a=1)

    @property
    def computed(self) -> Any:
        return self.value

    def __getattr__(self, name: str) -> Any:
        if name == "dynamic":
            return self.value
        raise AttributeError(name)

    def parents(self) -> Any:
        return super().inherited

    def parents_table(self) -> Any:
        return super().table


class Sized:
    """Has a length of its own."""

    def __init__(self) -> None:
        self.n = 1

    def __len__(self) -> int:
        return self.n

    def __contains__(self, x: Any) -> bool:
        return bool(x == self.n)

    def __iter__(self) -> Any:
        yield self.n


class Other(Thing):
    """Another class."""


class Pair(NamedTuple):
    """A named tuple."""

    a: Any
    b: Any


def _add(a: Any, b: Any = 0) -> Any:
    return a + b


def _cell() -> tuple[Callable[[Any], Any], Callable[[Any], None]]:
    n = 1

    def read(x: Any) -> Any:
        return n

    def write(value: Any) -> None:
        nonlocal n
        n = value

    return read, write


_READ, _WRITE = _cell()


def _defaulted(x: Any, n: Any = 1, *, k: Any = 1) -> Any:
    return n, k


def _global(x: Any) -> Any:
    return SCALE


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda x: setattr(x, name, value)


def _sets_global(name: str, value: Any) -> Callable[[Any], None]:
    return lambda x: globals().__setitem__(name, value)


def _maybe_unknown(x: Any) -> Any:
    try:
        return NOT_DEFINED  # type: ignore[name-defined]  # noqa: F821, RUF100
    except NameError:
        return 0


def _goes_through(x: Any) -> Any:
    return [y for y in x.items]  # noqa: C416


def _truth(x: Any) -> Any:
    return 1 if x.items else 2


def _negated(x: Any) -> Any:
    return not x.pairs


def _environment(x: Any) -> Any:
    return os.environ.get("GUARDS_TEST"), os.environ["GUARDS_OTHER"]


def _contains(key: Any) -> Callable[[Any], Any]:
    return lambda x: key in x.pairs


_SETTINGS.value = 1  # type: ignore[attr-defined]

# name: function, change, the change back, what `changed` says
READS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "attribute": (lambda x: x.value, _set("value", 2), _set("value", 1), "Thing.value (was 1, is 2)"),
    "class attribute": (lambda x: x.shared, lambda x: setattr(Thing, "shared", 2), lambda x: setattr(Thing, "shared", 1), "Thing.shared"),
    "class attribute hidden": (lambda x: x.shared, _set("shared", 2), lambda x: delattr(x, "shared"), "Thing.shared (was not there)"),
    "inherited": (
        lambda x: x.inherited,
        lambda x: setattr(Thing, "inherited", 2),
        lambda x: delattr(Thing, "inherited"),
        "Thing.inherited",
    ),
    "class attribute of the class": (
        lambda x: Thing.inherited,
        lambda x: setattr(Parent, "inherited", 2),
        lambda x: setattr(Parent, "inherited", 1),
        "Parent.inherited",
    ),
    "super": (
        lambda x: x.parents(),
        lambda x: setattr(Parent, "inherited", 2),
        lambda x: setattr(Parent, "inherited", 1),
        "Parent.inherited",
    ),
    "tensor through super": (
        lambda x: x.parents_table(),
        lambda x: Parent.table.fill_(2),
        lambda x: Parent.table.fill_(1),
        "the contents of a CPU tensor of shape [1]",
    ),
    "slot": (lambda x: x.slot, _set("slot", 2), _set("slot", 1), "Thing.slot"),
    "property": (lambda x: x.computed, _set("value", 2), _set("value", 1), "Thing.value"),
    "__getattr__": (lambda x: x.dynamic, _set("value", 2), _set("value", 1), "Thing.value"),
    "__getattr__ not asked": (lambda x: x.dynamic, _set("dynamic", 2), lambda x: delattr(x, "dynamic"), "Thing.dynamic (was not there)"),
    "getattr with a default": (lambda x: getattr(x, "later", 5), _set("later", 2), lambda x: delattr(x, "later"), "Thing.later"),
    "hasattr": (lambda x: hasattr(x, "later"), _set("later", 2), lambda x: delattr(x, "later"), "Thing.later (was not there)"),
    "isinstance": (
        lambda x: isinstance(x, Other),
        _set("__class__", Other),
        _set("__class__", Thing),
        "the class of an object, which was Thing",
    ),
    "type": (lambda x: type(x) is Thing, _set("__class__", Other), _set("__class__", Thing), "the class of an object"),
    "list element": (
        lambda x: x.items[0],
        lambda x: x.items.__setitem__(0, 5),
        lambda x: x.items.__setitem__(0, 1),
        "the elements of a list",
    ),
    "list gone through": (_goes_through, lambda x: x.items.append(3), lambda x: x.items.pop(), "the elements of a list"),
    "unpacked": (lambda x: (lambda a, b: b)(*x.items), lambda x: x.items.reverse(), lambda x: x.items.reverse(), "the elements of a list"),
    "slice": (lambda x: x.items[:1], lambda x: x.items.reverse(), lambda x: x.items.reverse(), "the elements of a list"),
    "len": (lambda x: len(x.items), lambda x: x.items.append(3), lambda x: x.items.pop(), "the length of a list"),
    "truth of a list": (_truth, lambda x: x.items.clear(), lambda x: x.items.extend((1, 2)), "whether a list is empty"),
    "truth of a dict": (_negated, lambda x: x.pairs.clear(), lambda x: x.pairs.update(a=1), "whether a dict is empty"),
    "truth of an attribute": (lambda x: x.nothing or 3, _set("nothing", 1), _set("nothing", None), "Thing.nothing"),
    "in a list": (lambda x: 1 in x.items, lambda x: x.items.reverse(), lambda x: x.items.reverse(), "the elements of a list"),
    "list compared": (lambda x: x.items == [1, 2], lambda x: x.items.append(3), lambda x: x.items.pop(), "the elements of a list"),
    "list added": (lambda x: x.items + [1], lambda x: x.items.append(3), lambda x: x.items.pop(), "the elements of a list"),  # noqa: RUF005
    "list printed": (lambda x: f"{x.items}", lambda x: x.items.append(3), lambda x: x.items.pop(), "the elements of a list"),
    "list in C": (lambda x: x.items.index(2), lambda x: x.items.append(3), lambda x: x.items.pop(), "the elements of a list"),
    "sorted": (lambda x: sorted(x.items), lambda x: x.items.append(3), lambda x: x.items.pop(), "the elements of a list"),
    "dict entry": (lambda x: x.pairs["a"], lambda x: x.pairs.update(a=5), lambda x: x.pairs.update(a=1), "['a'] of a dict (was 1, is 5)"),
    "dict get": (
        lambda x: x.pairs.get("z", 0),
        lambda x: x.pairs.update(z=5),
        lambda x: x.pairs.pop("z"),
        "['z'] of a dict (was not there)",
    ),
    "dict entry is gone": (
        lambda x: x.pairs.get("b"),
        lambda x: x.pairs.pop("b"),
        lambda x: x.pairs.update(b=2),
        "['b'] of a dict (was 2, is nothing)",
    ),
    "in a dict": (_contains("a"), lambda x: x.pairs.pop("a"), lambda x: x.pairs.update(a=1), "['a'] of a dict"),
    "not in a dict": (_contains("z"), lambda x: x.pairs.update(z=1), lambda x: x.pairs.pop("z"), "['z'] of a dict (was not there)"),
    "items of a dict": (
        lambda x: list(x.pairs.items()),
        lambda x: x.pairs.update(c=1),
        lambda x: x.pairs.pop("c"),
        "the elements of a dict",
    ),
    "dict merged": (lambda x: {**x.pairs}, lambda x: x.pairs.update(c=1), lambda x: x.pairs.pop("c"), "the elements of a dict"),
    "dict as keywords": (lambda x: dict(**x.pairs), lambda x: x.pairs.update(c=1), lambda x: x.pairs.pop("c"), "the elements of a dict"),
    "ordered dict": (lambda x: x.ordered["a"], lambda x: x.ordered.update(a=2), lambda x: x.ordered.update(a=1), "['a'] of a OrderedDict"),
    "deque": (lambda x: list(x.queue), lambda x: x.queue.append(2), lambda x: x.queue.pop(), "the elements of a deque"),
    "__len__": (lambda x: len(x.sized), lambda x: setattr(x.sized, "n", 2), lambda x: setattr(x.sized, "n", 1), "Sized.n"),
    "__contains__": (lambda x: 1 in x.sized, lambda x: setattr(x.sized, "n", 2), lambda x: setattr(x.sized, "n", 1), "Sized.n"),
    "__iter__": (lambda x: [*x.sized], lambda x: setattr(x.sized, "n", 2), lambda x: setattr(x.sized, "n", 1), "Sized.n"),
    "partial": (lambda x: x.part(2), _set("part", functools.partial(_add, 5)), None, "Thing.part"),  # type: ignore[dict-item]
    "named tuple": (lambda x: x.pair.a, _set("pair", Pair(5, 2)), None, "Thing.pair"),  # type: ignore[dict-item]
    "global": (_global, _sets_global("SCALE", 2), _sets_global("SCALE", 1), "the global SCALE (was 1, is 2)"),
    "unknown global": (_maybe_unknown, _sets_global("NOT_DEFINED", 2), lambda x: globals().pop("NOT_DEFINED"), "the global NOT_DEFINED"),
    "builtin hidden by a global": (
        lambda x: abs(-1),
        _sets_global("abs", lambda x: 7),
        lambda x: globals().pop("abs"),
        "the global abs (was not there)",
    ),
    "closure": (_READ, lambda x: _WRITE(2), lambda x: _WRITE(1), "a variable of an enclosing function (was 1, is 2)"),
    "default": (
        _defaulted,
        lambda x: setattr(_defaulted, "__defaults__", (2,)),
        None,
        "the code or the defaults of _defaulted",
    ),  # type: ignore[dict-item]
    "module attribute": (
        lambda x: _SETTINGS.value,
        lambda x: setattr(_SETTINGS, "value", 2),
        lambda x: setattr(_SETTINGS, "value", 1),
        "settings.value (was 1, is 2)",
    ),
    "environment": (
        _environment,
        lambda x: os.environ.update(GUARDS_TEST="b"),
        lambda x: os.environ.update(GUARDS_TEST="a"),
        "what",
    ),
    "environment entry": (
        _environment,
        lambda x: os.environ.update(GUARDS_OTHER="b"),
        lambda x: os.environ.update(GUARDS_OTHER="a"),
        "the environment variable GUARDS_OTHER",
    ),
    "in the environment": (
        lambda x: "GUARDS_NEW" in os.environ,
        lambda x: os.environ.update(GUARDS_NEW="b"),
        lambda x: os.environ.pop("GUARDS_NEW"),
        "the environment variable GUARDS_NEW",
    ),
    "context variable": (lambda x: _VARIABLE.get(), lambda x: _VARIABLE.set(2), lambda x: _VARIABLE.set(1), "what"),
    "numpy array": (
        lambda x: float(x.array[0]),
        lambda x: x.array.__setitem__(0, 5),
        lambda x: x.array.__setitem__(0, 1),
        "the contents of a numpy array",
    ),
    "CPU tensor": (lambda x: x.tensor + 1, lambda x: x.tensor[0].fill_(5), lambda x: x.tensor[0].fill_(1), "the contents of a CPU tensor"),
    "another CPU tensor": (lambda x: x.tensor + 1, _set("tensor", torch.ones(3)), _set("tensor", torch.tensor([1.0, 2.0])), "Thing.tensor"),
    "global CPU tensor": (lambda x: TABLE + 1, lambda x: TABLE[0].fill_(5), lambda x: TABLE[0].fill_(1), "the contents of a CPU tensor"),
    "CPU tensor in a tuple": (
        lambda x: x.tuple[1] + 1,
        lambda x: x.tuple[1].fill_(5),
        lambda x: x.tuple[1].fill_(1),
        "the contents of a CPU tensor",
    ),
}


@pytest.fixture
def thing() -> Any:
    x = Thing()
    x.sized = Sized()
    x.pair = Pair(1, 2)
    _VARIABLE.set(1)
    os.environ.update(GUARDS_TEST="a", GUARDS_OTHER="a")
    yield x
    _defaulted.__defaults__ = (1,)
    for name in ("GUARDS_TEST", "GUARDS_OTHER"):
        os.environ.pop(name, None)


def _asked_of(function: Callable[[Any], Any], x: Any) -> Any:
    """The conditions of a run that has been followed wholly; the thing is no argument, as arguments are compared elsewhere."""
    _, observer = watched(function, x)
    assert observer.reason == ""
    assert observer.conditions.changed() == ""
    assert observer.conditions.hold()
    return observer.conditions


@pytest.mark.parametrize("name", READS)
def test_a_read_is_a_condition(thing: Any, name: str) -> None:
    function, change, back, says = READS[name]
    conditions = _asked_of(function, thing)
    thing.unrelated, thing.brand_new = 2, 3
    globals()["OTHER"] = 2
    assert conditions.hold(), conditions.changed()
    change(thing)
    try:
        assert not conditions.hold()
        assert says in conditions.changed()
        assert not conditions.hold()
    finally:
        if back is not None:
            back(thing)
    if back is not None:
        assert conditions.changed() == ""
        assert conditions.hold()


def test_a_dict_in_another_place_is_another_one(thing: Any) -> None:
    conditions = _asked_of(lambda x: x.value, thing)
    thing.__dict__ = dict(thing.__dict__)
    assert not conditions.hold()
    assert conditions.changed() == "the __dict__ of a Thing"


def test_bases_of_a_class(thing: Any) -> None:
    class Left:
        pass

    class Right:
        pass

    class Child(Left):
        pass

    x = Child()
    x.value = 1  # type: ignore[attr-defined]
    conditions = _asked_of(lambda x: x.value, x)
    Child.__bases__ = (Right,)
    assert not conditions.hold()
    assert "the bases of Child" in conditions.changed() or "Child" in conditions.changed()


def test_keyword_defaults(thing: Any) -> None:
    conditions = _asked_of(_defaulted, thing)
    assert _defaulted.__kwdefaults__ is not None
    _defaulted.__kwdefaults__["k"] = 2
    try:
        assert not conditions.hold()
        assert conditions.changed() == "the defaults of _defaulted"
    finally:
        _defaulted.__kwdefaults__["k"] = 1
    assert conditions.hold()


def test_a_tuple_with_an_equal_tensor_is_still_watched(thing: Any) -> None:
    conditions = _asked_of(lambda x: x.tuple[1] + 1, thing)
    new = torch.tensor([1.0])
    thing.tuple = (1, new)
    assert conditions.hold()
    new.fill_(7)
    assert not conditions.hold()
    assert "Thing.tuple" in conditions.changed()


def test_a_list_that_was_empty(thing: Any) -> None:
    thing.items = []
    conditions = _asked_of(_goes_through, thing)
    thing.items.append(1)
    assert not conditions.hold()
    assert conditions.changed() == "the elements of a list (was empty)"


def test_two_runs_of_a_hold_after_equal_numbers_were_put_in_place(thing: Any) -> None:
    thing.value, thing.slot = int("1000"), float("1.5")
    conditions = _asked_of(lambda x: (x.value, x.slot), thing)
    thing.value, thing.slot = int("1000"), float("1.5")
    assert conditions.hold()
    assert conditions.hold()
    thing.value = 1001
    assert not conditions.hold()


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        (0.0, -0.0, False),
        (-0.0, 0.0, False),
        (_NAN, _NAN, True),
        (_NAN, float("nan"), True),
        (True, 1, False),
        (1, 1.0, False),
        (1, True, False),
        (10**20, int("1" + "0" * 20), True),
        ("text", "".join(["te", "xt"]), True),
        ((1, 2.0), (1, float("2")), True),
        ((1, 2.0), (1, 2), False),
        ((1, (2,)), (1, (2,)), True),
        ((0.0,), (-0.0,), False),
        ((1,), (1, 1), False),
        (1j, complex(0, 1), True),
        (complex(0, 0.0), complex(0, -0.0), False),
        (b"a", bytes([97]), True),
        (range(0, 3, 2), range(0, 4, 2), False),
        (range(3), range(0, 3), True),  # noqa: PIE808
        (slice(1, 2), slice(1, 2), True),
        (slice(1, 2), slice(True, 2), False),
        (frozenset([1]), frozenset([True]), False),
        (frozenset([1, "a"]), frozenset(["a", 1]), True),
        (torch.float32, torch.float16, False),
        (torch.device("cpu"), torch.device("cpu"), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0]), True),
        (torch.tensor([1.0]), torch.tensor([1]), False),
        (torch.tensor([1.0]), torch.tensor([1.0], requires_grad=True), False),
        (torch.tensor([1.0]), torch.nn.Parameter(torch.tensor([1.0])), False),
        ([1], [1], False),
        (None, False, False),
    ],
)
def test_which_values_are_the_same(thing: Any, before: Any, after: Any, same: bool) -> None:
    assert alike(before, after) is same
    thing.value = before
    conditions = _asked_of(lambda x: x.value, thing)
    thing.value = after
    assert conditions.hold() is same
    assert (conditions.changed() == "") is same


class Block(torch.nn.Module):
    """A module with parts of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.layers = torch.nn.ModuleList([torch.nn.ReLU(), torch.nn.Identity()])
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        x = self.linear(x)
        return x * self.scale if self.training else x


MODULE_CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "training": (lambda m: m.eval(), lambda m: m.train(), "Block.training (was True, is False)"),
    "buffer": (lambda m: m.scale.fill_(2), lambda m: m.scale.fill_(1), "the contents of a CPU tensor of shape [1]"),
    "parameter": (lambda m: m.linear.bias.data.neg_(), lambda m: m.linear.bias.data.neg_(), "the contents of a CPU tensor of shape [2]"),
    "needs a gradient": (
        lambda m: m.linear.weight.requires_grad_(False),
        lambda m: m.linear.weight.requires_grad_(True),
        "the contents of a CPU tensor of shape [2, 2]",
    ),
    "layer is replaced": (lambda m: m.layers.__setitem__(0, torch.nn.Tanh()), None, "the elements of a dict"),  # type: ignore[dict-item]
    "layer is added": (lambda m: m.layers.append(torch.nn.Tanh()), None, ""),  # type: ignore[dict-item]
    "hook": (
        lambda m: m.linear.register_forward_hook(print),
        lambda m: m.linear._forward_hooks.clear(),
        "Linear._forward_hooks (was empty)",
    ),
    "forward of one": (
        lambda m: setattr(m.linear, "forward", lambda x: x),
        lambda m: delattr(m.linear, "forward"),
        "Linear.forward (was not there)",
    ),
    "forward of the class": (
        lambda m: setattr(torch.nn.ReLU, "extra", torch.nn.ReLU.forward) or setattr(torch.nn.ReLU, "forward", lambda self, x: x),
        lambda m: setattr(torch.nn.ReLU, "forward", torch.nn.ReLU.extra) or delattr(torch.nn.ReLU, "extra"),
        "ReLU.forward",
    ),
    "class": (
        lambda m: setattr(m.linear, "__class__", torch.nn.Bilinear),
        lambda m: setattr(m.linear, "__class__", torch.nn.Linear),
        "the class of an object, which was Linear",
    ),
}


@pytest.mark.parametrize("name", MODULE_CHANGES)
def test_what_a_module_reads_is_a_condition(name: str) -> None:
    change, back, says = MODULE_CHANGES[name]
    m = Block()
    x = torch.ones(1, 2)
    found, observer = watched(m, x)
    assert observer.reason == ""
    assert torch.equal(found, m(x))
    conditions = observer.conditions
    m.note = "unrelated"  # type: ignore[assignment]
    assert conditions.hold(), conditions.changed()
    change(m)
    try:
        assert not conditions.hold()
        assert says in conditions.changed()
        assert conditions.changed()
    finally:
        if back is not None:
            back(m)
    if back is not None:
        assert conditions.hold(), conditions.changed()
