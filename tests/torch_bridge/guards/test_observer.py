"""Why nothing may be concluded from a run: the reasons, whether they last, and that the run computes what it would."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import dataclasses
import functools
import gc
import inspect
import logging
import math
import os
import pathlib
import random
import re
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.torch_bridge.guards.watching import watched
from torch_bridge.guards import calls, libraries
from torch_bridge.guards.observer import ACTIVE, Observer, Watchdog

COUNT = 0
_MEMORY = memoryview(b"a")
_CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("_CONTEXT", default=0)
_CACHE = functools.lru_cache(lambda x: x)


class Holder:
    """What a forward may find and change."""

    def __init__(self) -> None:
        self.n = 1
        self.items = [1, 2]
        self.pairs = {"a": 1}
        self.array = np.array([1.0, 2.0])
        self.out = np.array([1.0, 2.0])
        self.tensor = torch.tensor([1.0, 2.0])
        self.other = self.tensor
        self.half = 0.5
        self.big = torch.zeros(1 << 16)
        self.big_array = np.zeros(1 << 16)
        self.iterator: Iterator[int] = iter([1, 2, 3])
        self.deque = collections.deque([1])
        self.logger = logging.getLogger("guards.test")
        self.equal = Equal()

    @property
    def total(self) -> int:
        return self.n

    @total.setter
    def total(self, value: int) -> None:
        self.n = value


class Equal:
    """Compares and adds in Python."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1

    def __add__(self, other: Any) -> Any:
        return other

    def __bool__(self) -> bool:
        return True


class Finalized:
    """Has a finalizer."""

    def __del__(self) -> None:
        pass


class Metered(type):
    """A class of classes with an attribute of its own."""

    @property
    def level(cls) -> int:
        return 1


class Meter(metaclass=Metered):
    """Its level comes from its metaclass."""


def _global(x: Any) -> Any:
    global COUNT
    COUNT += 1
    return COUNT


def _nonlocal(x: Any) -> Any:
    n = 0

    def inner() -> None:
        nonlocal n
        n += 1

    inner()
    return n


def _match(x: Any) -> Any:
    match x.n:
        case 1:
            return "one"


def _class(x: Any) -> Any:
    class Inner:
        pass

    return Inner.__name__


def _decorated(x: Any) -> Any:
    @functools.cache
    def inner() -> int:
        return 1

    return inner()


async def _coroutine() -> int:
    return 1


def _asynchronous(x: Any) -> Any:
    return asyncio.run(_coroutine())


def _imports_all(x: Any) -> Any:
    import this_module_is_not_there  # type: ignore[import-not-found]

    return this_module_is_not_there


def _sets(x: Any) -> Any:
    x.n = x.n + 1
    return x.n


def _sets_and_resets(x: Any) -> Any:
    before = x.n
    x.n = 100
    found = x.n
    x.n = before
    return found


def _adds_item(x: Any) -> Any:
    x.pairs["b"] = 2
    return len(x.pairs)


def _deletes_item(x: Any) -> Any:
    del x.pairs["a"]


def _deletes(x: Any) -> Any:
    del x.n


def _sets_element(x: Any) -> Any:
    x.items[0] = 5
    return x.items


def _augments(x: Any) -> Any:
    x.items += [3]
    return x.items


def _sets_property(x: Any) -> Any:
    x.total = 7
    return x.n


def _sets_dict(x: Any) -> Any:
    x.__dict__ = {"n": 5}


def _sets_class_attribute(x: Any) -> Any:
    Holder.extra = 1  # type: ignore[attr-defined]


def _sets_tensor_attribute(x: Any) -> Any:
    x.tensor.mark = 1


def _writes_tensor(x: Any) -> Any:
    x.tensor[0] = 5
    return x.tensor


def _writes_tensor_augmented(x: Any) -> Any:
    t = x.tensor
    t += 1
    return t


def _writes_view_of_array(x: Any) -> Any:
    np.reshape(x.array, -1)[0] = 5
    return x.array


def _writes_array_through_torch(x: Any) -> Any:
    return torch.from_numpy(x.array).add_(1)


def _sets_context(x: Any) -> Any:
    _CONTEXT.set(_CONTEXT.get() + 1)


def _enters(x: Any) -> Any:
    with warnings.catch_warnings():
        return 1


def _goes_through_iterator(x: Any) -> Any:
    return next(x.iterator)


def _loops_over_iterator(x: Any) -> Any:
    for y in x.iterator:
        return y


def _yields(x: Any) -> Any:
    return [k for k in _generator(x)]  # noqa: C416


def _generator(x: Any) -> Iterator[int]:
    yield x.n


# function, what the reason says, whether it lasts
REFUSED: dict[str, tuple[Callable[[Any], Any], str, bool]] = {
    "global statement": (_global, "assigns a global variable", True),
    "nonlocal statement": (_nonlocal, "assigns a variable of an enclosing function", True),
    "match statement": (_match, "has a match statement", True),
    "class statement": (_class, "defines a class", True),
    "decorated inner function": (_decorated, "defines a decorated function", True),
    "asynchronous": (_asynchronous, "", True),
    "locals": (lambda x: locals(), "calls locals", True),
    "eval": (lambda x: eval("1"), "calls eval", True),
    "frame": (lambda x: sys._getframe().f_lineno > 0, "it calls _getframe", True),
    "stack": (lambda x: len(inspect.stack()) > 0, "it calls stack", True),
    "sets an attribute": (_sets, "its forward changes Holder.n", False),
    "sets with setattr": (lambda x: setattr(x, "n", 5), "its forward changes Holder.n", False),
    "deletes an attribute": (_deletes, "its forward changes Holder.n", False),
    "adds an item": (_adds_item, "its forward changes ['b'] of a dict", False),
    "deletes an item": (_deletes_item, "its forward changes ['a'] of a dict", False),
    "sets an element": (_sets_element, "it changes a list", False),
    "augments a list": (_augments, "it changes a list", False),
    "appends": (lambda x: x.items.append(1), "it changes a list that was there before", False),
    "updates a dict": (lambda x: x.pairs.update(a=2), "it changes a dict that was there before", False),
    "setdefault": (lambda x: x.pairs.setdefault("z", []), "it changes a dict that was there before", False),
    "pops from a deque": (lambda x: x.deque.pop(), "it changes a deque that was there before", False),
    "sets a property": (_sets_property, "it sets Holder.total", False),
    "sets __dict__": (_sets_dict, "it sets Holder.__dict__", False),
    "sets an attribute of a class": (_sets_class_attribute, "it sets Holder.extra", False),
    "sets an attribute of a tensor": (_sets_tensor_attribute, "it sets a tensor.mark", False),
    "writes a CPU tensor": (_writes_tensor, "it writes into a CPU tensor that was there before", True),
    "augments a CPU tensor": (_writes_tensor_augmented, "it writes into a CPU tensor that was there before", True),
    "in-place op on a CPU tensor": (lambda x: x.tensor.add_(1), "it writes into a CPU tensor that was there before", True),
    "in-place function": (lambda x: torch.relu_(x.tensor), "it writes into a CPU tensor that was there before", True),
    "out": (lambda x: torch.add(x.tensor, 1, out=x.tensor), "it writes into a CPU tensor that was there before", True),
    "view of a CPU tensor": (lambda x: x.tensor.view(-1)[:1].zero_(), "it writes into a CPU tensor that was there before", True),
    "view of an array": (_writes_view_of_array, "it changes a ndarray", False),
    "array through torch": (_writes_array_through_torch, "it writes into a CPU tensor that was there before", True),
    "method of an array": (lambda x: x.array.sort(), "it changes a numpy array", False),
    "out of a method of an array": (lambda x: x.array.clip(0, 1, out=x.out), "it changes a numpy array", False),
    "out of numpy": (lambda x: np.add(x.array, 1, out=x.out), "it calls", True),
    "positional out of numpy": (lambda x: np.add(x.array, 1, x.out), "it calls", True),
    "at of numpy": (lambda x: np.add.at(x.array, [0], 1), "it calls", True),
    "fill_diagonal": (lambda x: np.fill_diagonal(x.array.reshape(1, 2), 1), "it calls numpy.fill_diagonal", True),
    "big CPU tensor": (lambda x: x.big, "it reads a CPU tensor of 262144 bytes; move it to xla, or make it a buffer", True),
    "big array": (lambda x: x.big_array + 1, "it reads a numpy array of 524288 bytes; make it a buffer", True),
    "history of a tensor": (lambda x: x.tensor.grad_fn, "it looks at how a tensor was computed (.grad_fn)", True),
    "version of a tensor": (lambda x: x.tensor._version, "it looks at how often a tensor was written", True),
    "hook on a tensor": (lambda x: x.tensor.clone().requires_grad_().register_hook(print), "it registers a hook on a tensor", True),
    "prints a tensor": (lambda x: f"{x.tensor}", "it prints a tensor", True),
    "prints a tensor's repr": (lambda x: f"{x.tensor.sum()!r}", "it prints a tensor", True),
    "format of a tensor": (lambda x: format(x.tensor), "it prints a tensor", True),
    "str of a tensor": (lambda x: str(x.tensor), "it prints a tensor", True),
    "address of a tensor": (lambda x: x.tensor.data_ptr() > 0, "it looks at the address of a tensor", True),
    "context variable": (_sets_context, "its forward changes the context variable _CONTEXT", False),
    "context manager": (_enters, "it enters a catch_warnings", True),
    "next of an iterator": (_goes_through_iterator, "it takes an element from a list_iterator that was there before", True),
    "loop over an iterator": (_loops_over_iterator, "it takes elements from a list_iterator that was there before", True),
    "random": (lambda x: random.random() < 2, "random", True),
    "time": (lambda x: time.time() > 0, "it calls time.time", True),
    "id": (lambda x: id(x) > 0, "it calls id", True),
    "print": (lambda x: print(end=""), "it calls print", True),  # noqa: T201
    "open": (lambda x: open(os.devnull).close(), "open", True),
    "Python's comparison": (lambda x: x.equal == 1, "it compares a Equal", True),
    "identity of tensors": (lambda x: x.tensor is x.other, "it compares the identity of a Tensor", True),
    "identity of numbers": (lambda x: x.half is not x.array, "it compares the identity of a float", True),
    "Python's operator": (lambda x: x.equal + 1, "it applies an operator to a Equal", True),
    "Python's truth beside or": (lambda x: x.equal or 2, "it asks whether a Equal is true, beside `and` or `or`", True),
    "Python's hash": (lambda x: {x.equal: 1}[x.equal], "it uses a Equal as a key", True),
    "prints an object": (lambda x: f"{x}" != "", "it prints a Holder", True),
    "goes through a memoryview": (lambda x: [*_MEMORY], "it goes through a memoryview", True),
    "finalizer": (lambda x: type(Finalized()).__name__, "it makes a Finalized, which has a finalizer", True),
    "metaclass": (lambda x: Meter.level, "it reads Meter.level through its metaclass Metered", True),
    "three arguments of type": (lambda x: type("New", (), {}).__name__, "it calls type", True),
    "lru_cache": (lambda x: _CACHE(1), "its cache counts who asks", True),
    "logger": (lambda x: x.logger.critical("said"), "it calls", True),
    "module makes an attribute": (lambda x: _LAZY.made, "it runs _Lazy.__getattr__, called from code that cannot be followed", True),
    "copies": (lambda x: __import__("copy").copy(x.items), "it calls __import__", True),
}


class _Lazy(type(os)):  # type: ignore[misc]
    """A module that makes what it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name == "made":
            return 1
        raise AttributeError(name)


_LAZY = _Lazy("lazy")


@pytest.fixture(autouse=True)
def _tidy() -> Iterator[None]:
    logging.getLogger("guards.test").addHandler(logging.NullHandler())
    logging.getLogger("guards.test").propagate = False
    token = _CONTEXT.set(0)
    yield
    _CONTEXT.reset(token)
    if hasattr(Holder, "extra"):
        del Holder.extra


def _plainly(x: Any) -> Any:
    return x.tolist() if isinstance(x, (torch.Tensor, np.ndarray)) else repr(x).split(" at 0x")[0]


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_why_and_computes_the_same(name: str) -> None:
    global COUNT
    function, says, lasting = REFUSED[name]
    COUNT = 0
    with contextlib.suppress(LookupError):
        _CONTEXT.set(0)
    expected = _plainly(function(Holder()))
    COUNT = 0
    _CONTEXT.set(0)
    found, observer = watched(function, Holder())
    assert _plainly(found) == expected
    assert observer.reason and says in observer.reason
    assert observer.lasting is lasting
    assert sys.getprofile() is None


def test_a_reason_names_the_line() -> None:
    _, observer = watched(_sets_element, Holder())
    assert f"(test_observer.py:{_sets_element.__code__.co_firstlineno + 1})" in observer.reason


def test_the_first_reason_stays() -> None:
    def both(x: Any) -> None:
        id(x)
        x.items.append(1)

    _, observer = watched(both, Holder())
    assert "it calls id" in observer.reason
    assert observer.lasting


FOLLOWED: dict[str, Callable[[Any], Any]] = {
    "sets and resets": _sets_and_resets,
    "generator": _yields,
    "stack of torch": lambda x: torch.stack([x.tensor, x.tensor]).tolist(),
    "own list": lambda x: [y := [1], y.append(2), y.sort(), y][-1],
    "own dict": lambda x: [d := {"a": 1}, d.update(b=2), d.setdefault("c", []).append(1) if False else None, d.pop("a"), d][-1],
    "own tensor": lambda x: (x.tensor + 1).add_(1).tolist(),
    "own copy of an array": lambda x: (x.array + 1).tolist(),
    "math": lambda x: math.sqrt(x.n) + math.floor(2.5),
    "disabled logger": lambda x: x.logger.debug("not said"),
    "copied list": lambda x: [y := list(x.items), y.append(3), y][-1],
    "sorted": lambda x: sorted(x.items, key=lambda y: -y),
    "identity": lambda x: (x is x, x.tensor is None, x.items is not x.pairs, type(x) is Holder),
    "named by type": lambda x: type(x).__name__,
    "nullcontext": lambda x: _in_nullcontext(x),
    "keyword arguments": lambda x: _keywords(a=1, b=2),
    "no_grad": lambda x: _without_gradients(x).tolist(),
    "string methods": lambda x: "a-b".split("-")[0].upper(),  # noqa: SIM905
    "new object": lambda x: _new_object(),
    "what a backend says": lambda x: torch._C._mps_is_in_bad_fork(),  # as `_cuda_isCurrentStreamCapturing` of CUDA builds
    "regular expressions": lambda x: (re.findall("[A-Z]", "ForCausalLM"), re.match("a(b)", "abc").group(1)),  # type: ignore[union-attr]
    "use of an API is logged": lambda x: torch._C._log_api_usage_once("a test"),
}


def _in_nullcontext(x: Any) -> Any:
    with contextlib.nullcontext(x.n) as n:
        return n


def _keywords(**kwargs: Any) -> Any:
    kwargs["c"] = 3
    return kwargs.pop("a"), kwargs


def _without_gradients(x: Any) -> Any:
    with torch.no_grad():
        return x.tensor * 2


def _new_object() -> Any:
    new = Holder.__new__(Holder)
    new.n = 3
    new.n += 1
    return new.n, new.total


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_followed(name: str) -> None:
    function = FOLLOWED[name]
    expected = function(Holder())
    found, observer = watched(function, Holder())
    assert found == expected
    assert observer.reason == ""
    assert observer.conditions.changed() == ""
    assert observer.conditions.hold()


def test_a_function_called_from_c_that_is_not_routed_is_seen() -> None:
    """The watchdog: `list.sort` of objects that compare in Python."""

    class Ordered:
        def __lt__(self, other: Any) -> bool:
            return False

    found, observer = watched(lambda x: x[0] < x[1], (Ordered(), Ordered()))
    assert found is False
    assert "it runs" in observer.reason and "__lt__, called from code that cannot be followed" in observer.reason
    assert observer.lasting


@dataclasses.dataclass(frozen=True)
class Inner:
    n: int


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner


@pytest.mark.parametrize(
    "hashing, reason", [(collections.Counter, ""), (lambda found: {*found}, "<lambda>, called from code that cannot be followed")]
)
def test_a_hash_that_asks_for_another_is_that_of_who_asks_first(hashing: Callable[..., Any], reason: str) -> None:
    """A library may use dataclasses of dataclasses as keys, as JAX does while it compiles."""
    observer, found = Observer(calls.call), [Outer(Inner(1))]
    with Watchdog(observer):
        hashing(found)
    assert reason in observer.reason and bool(reason) == bool(observer.reason)


def test_a_tracer_is_left_alone() -> None:
    seen: list[Any] = []

    def tracer(frame: Any, event: str, arg: Any) -> None:
        seen.append(event)

    sys.setprofile(tracer)
    try:
        found, observer = watched(lambda x: x.n, Holder())
        assert sys.getprofile() is tracer
    finally:
        sys.setprofile(None)
    assert found == 1
    assert "a profiler or a tracer follows this thread" in observer.reason
    assert not observer.lasting


def test_a_changed_argument_is_told() -> None:
    given = [1]
    observer = Observer(calls.call, ((given,), {}))
    calls.run(lambda x: x.append(2), (given,), {}, observer)
    assert "it changes a list that it was given" in observer.reason
    assert not observer.lasting


def test_an_exception_leaves_nothing_behind() -> None:
    observer = Observer(calls.call, ())

    def raises() -> None:
        raise KeyError("text")

    with pytest.raises(KeyError, match="text"):
        calls.run(raises, (), {}, observer)
    assert sys.getprofile() is None
    assert ACTIVE.observer is None


def test_a_function_without_source_is_refused() -> None:
    space: dict[str, Any] = {}
    exec("def made(x):\n    return x.n\n", space)
    found, observer = watched(space["made"], Holder())
    assert found == 1
    assert "the source of made" in observer.reason
    assert observer.lasting


class Cyclic:
    """Has a finalizer, and is found by the garbage collector only."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        global COUNT
        COUNT += 1


def _replacement(match: re.Match[str]) -> str:
    return "b"


def test_the_garbage_collector_runs_when_it_is_due() -> None:
    """Its callbacks and the finalizers that it runs belong to no forward; they run as they would, and the run is watched on after them."""
    phases = []

    def callback(phase: str, info: dict[str, int]) -> None:
        phases.append(phase)

    def forward(x: int) -> list[list[int]]:
        return [[x, k] for k in range(100)]

    def calls_back(x: int) -> list[list[int]]:
        found = forward(x)
        re.sub("a", _replacement, "a")
        return found

    gc.collect()
    thresholds, before, callbacks = gc.get_threshold(), COUNT, list(gc.callbacks)
    gc.callbacks.append(callback)
    gc.set_threshold(5, 1, 1)
    try:
        for function in (forward, calls_back):
            Cyclic()
            result, observer = watched(function, 3)
            assert result == [[3, k] for k in range(100)]
            assert bool(observer.reason) == (function is calls_back), observer.reason
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(callback)
    assert {"start", "stop"} == set(phases) and before < COUNT
    assert gc.callbacks == callbacks and sys.getprofile() is None


def test_modules_that_are_made_after_torch_compile_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile has every `Module.__init__` note the module: slices of a ModuleList are made in many forwards."""
    from torch._dynamo import mutation_guard

    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(torch.nn.Module, name, getattr(torch.nn.Module, name))
    monkeypatch.setattr(torch.nn.Module, "___needs_generation_tag_patch", True, raising=False)
    mutation_guard.install_generation_tagging_init()
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))

    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer in layers[:2]:
            x = layer(x)
        return x

    result, observer = watched(forward, torch.ones(1, 2))
    assert result.shape == (1, 2) and not observer.reason


@pytest.mark.parametrize("device, reason", [("xla", ""), ("cpu", "it sets a tensor._dynamo_static_input_type")])
def test_marks_for_cuda_graphs(device: str, reason: str) -> None:
    """Caches of states, as Mamba's in transformers, mark their tensors so. On the CPU `torch.compile` reads the mark."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x)
        torch._dynamo.mark_static_address(state)
        return state.copy_(x)

    result, observer = watched(forward, torch.ones(2, device=device))
    assert result.tolist() == [1.0, 1.0] and observer.reason.startswith(reason) and bool(observer.reason) == bool(reason)


class Checked(torch.nn.Linear):
    """Has a call of its own, as layers of transformers 4.5x do."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def test_torchs_call_from_that_of_a_class() -> None:
    layer = Checked(2, 2)
    layer.register_forward_hook(lambda module, args, out: out + 1)
    result, observer = watched(lambda x: layer(x), torch.ones(1, 2))
    assert result.equal(layer(torch.ones(1, 2))) and observer.reason == ""


def test_transformers_own_files_are_known_wherever_they_lie(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed by `pip install --target`, in a checkout, in Debian's dist-packages."""
    package = types.ModuleType("transformers")
    package.__file__ = str(tmp_path / "transformers" / "__init__.py")
    monkeypatch.setitem(sys.modules, "transformers", package)
    for path, known in {"utils/generic.py": True, "utils/import_utils.py": True, "models/llama/modeling_llama.py": False}.items():
        code = compile("def f(): pass", str(tmp_path / "transformers" / path), "exec")
        assert libraries.is_library(code) is known, path
