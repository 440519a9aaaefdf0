"""Functions that use each part of Python's syntax. Each gets a `Log`, and gives back something that can be compared."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Log:
    """Notes calls in order. say: notes a word, and gives the value back."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def say(self, word: Any, value: Any = None) -> Any:
        self.said.append(word)
        return word if value is None else value


class Box:
    """An object with attributes; its items and attributes are noted when they are read or written."""

    def __init__(self, log: Log, **entries: Any):
        self.log = log
        self.__dict__.update(entries)
        self.held: dict[Any, Any] = {}

    def __getitem__(self, key: Any) -> Any:
        self.log.said.append(("get", key))
        return self.held[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.log.said.append(("set", key, value))
        self.held[key] = value

    def __delitem__(self, key: Any) -> None:
        self.log.said.append(("del", key))
        del self.held[key]


class Truthy:
    """Says whether it is true, and counts how often it was asked."""

    def __init__(self, log: Log, name: str, answer: Any):
        self.log, self.name, self.answer = log, name, answer

    def __bool__(self) -> bool:
        self.log.said.append(self.name)
        return self.answer


CASES: list[Callable[[Log], Any]] = []


def case(f: Callable[[Log], Any]) -> Callable[[Log], Any]:
    """Put a function in the table."""
    CASES.append(f)
    return f


# -- expressions


@case
def chained_comparison(log: Log) -> Any:
    return [1 < log.say("a", 2) < log.say("b", 3), 5 < log.say("c", 4) < log.say("d", 9), 1 < 2 > 0 != log.say("e", 5) is not None]


@case
def comparison_with_in(log: Log) -> Any:
    return [1 in [1, 2], 3 not in (1, 2), "a" in "cat", 2 in {2: 1}, 1 in {1} in [{1}], 1 == 1 in [1]]


@case
def in_a_number(log: Log) -> Any:
    return log.say(1) in log.say("n", 5)


@case
def short_circuits(log: Log) -> Any:
    return [log.say("a", 1) or log.say("b", 2), log.say("", "") or log.say("c", 3), log.say("d", []) and log.say("e"), 0 or "" or None]


@case
def short_circuit_asks_once(log: Log) -> Any:
    first, second = Truthy(log, "first", False), Truthy(log, "second", True)
    return [(first or second) is second, (second and first) is first, not first, 1 if first or second else 2]


@case
def last_operand_is_not_asked(log: Log) -> Any:
    last = Truthy(log, "last", "not a bool")
    return (0 or last) is last


@case
def bool_that_says_something_else(log: Log) -> Any:
    if Truthy(log, "odd", "yes"):
        return 1
    return 2


@case
def conditional_expression(log: Log) -> Any:
    return [log.say("x") if log.say("t", True) else log.say("y"), log.say("x") if not log.say("u", True) else log.say("y")]


@case
def walrus(log: Log) -> Any:
    if (n := log.say("n", 3)) > 2 and (m := n + 1):
        return [n, m, [y := 1, y + 1], [last := k for k in range(n)], last]
    return None


@case
def operators(log: Log) -> Any:
    a, b = log.say("a", 7), log.say("b", 3)
    return [a + b, a - b, a * b, a / b, a // b, a % b, a**b, a << b, a >> b, a | b, a ^ b, a & b, -a, +a, ~a, not a, [1] * 2 + [3]]


@case
def operand_order(log: Log) -> Any:
    return log.say("a", 1) + log.say("b", 2) * log.say("c", 3) - (log.say("d", 4) if log.say("e") else 0)


@case
def division_by_zero(log: Log) -> Any:
    return log.say("a", 1) / (log.say("b", 1) - 1)


@case
def operator_of_wrong_types(log: Log) -> Any:
    return 1 + log.say("text")


@case
def f_strings(log: Log) -> Any:
    x, width = 3.14159, 8
    return [f"{x:.2f}|{x:>{width}.{width - 5}f}|{x!r}|{x!s:>10}|{'q'!a}", f"{log.say('a')}{log.say('b')}", f"{x = }", f"{{}}{1:02d}"]


@case
def f_string_with_a_wrong_spec(log: Log) -> Any:
    return f"{'text':d}"


@case
def slices(log: Log) -> Any:
    x = list(range(10))
    return [x[1:], x[:3], x[::2], x[-1], x[log.say("a", 1) : log.say("b", 8) : log.say("c", 3)], (1, 2, 3)[1:], "text"[::-1]]


@case
def tuples_of_slices(log: Log) -> Any:
    box = Box(log)
    box[1:2, ..., None] = 1
    box[log.say("i", 0), log.say("j", 1)] = 2
    return [str(k) for k in box.held], box[0, 1]


@case
def index_out_of_range(log: Log) -> Any:
    x = [1]
    return x[log.say("i", 3)]


@case
def key_that_is_not_there(log: Log) -> Any:
    return {"a": 1}["b"]


@case
def attribute_that_is_not_there(log: Log) -> Any:
    return log.missing


@case
def attribute_of_none(log: Log) -> Any:
    x = log.say("n", 0) or None
    return x.shape


@case
def displays(log: Log) -> Any:
    a, d = [1, 2], {"x": 1}
    return [[*a, 3, *range(2)], (*a,), {*a, 3}, {**d, "y": 2, **{"x": 5}}, {log.say("k"): log.say("v"), log.say("l"): log.say("w")}]  # noqa: PIE800


@case
def unhashable_key(log: Log) -> Any:
    return {[]: 1}


# -- comprehensions and generators


@case
def comprehensions(log: Log) -> Any:
    rows = [[1, 2], [3, 4]]
    return [
        [x * y for x in (1, 2) for y in range(x) if y % 2 == 0 if x],
        [[y + 1 for y in row if y > 1] for row in rows],
        {x for row in rows for x in row},
        {k: v for k, v in zip("ab", rows, strict=True)},  # noqa: C416
        [a + b for a, b in rows],
        [a for a, *_ in rows],
        [f(2) for f in [lambda x, n=n: x + n for n in range(2)]],
    ]


@case
def comprehension_order(log: Log) -> Any:
    return [log.say(("elt", x)) for x in log.say("iter", [1, 2]) if log.say(("if", x))], {
        log.say(("k", x)): log.say(("v", x)) for x in (1, 2)
    }


@case
def generator_expression_is_lazy(log: Log) -> Any:
    g = (log.say(x) for x in log.say("iter", [1, 2, 3]))
    log.say("made")
    return [next(g), any(x == 2 for x in g), list(g), next(g, "over")]


@case
def generators(log: Log) -> Any:
    def inner(n: int) -> Iterator[Any]:
        for k in range(n):
            got = yield k
            log.say(("got", got))
        return "end"

    def outer() -> Iterator[Any]:
        found = yield from inner(2)
        log.say(found)
        yield from [7, 8]

    g = outer()
    return [next(g), next(g), *g]


@case
def generator_is_sent_to(log: Log) -> Any:
    def echo() -> Iterator[Any]:
        try:
            while True:
                log.say((yield))
        finally:
            log.say("closed")

    g = echo()
    next(g)
    g.send("x")
    g.close()
    return "done"


# -- functions


@case
def arguments(log: Log) -> Any:
    def f(a: Any, /, b: Any, c: Any = 3, *rest: Any, d: Any, e: Any = 5, **others: Any) -> Any:
        others["f"] = 0
        return a, b, c, rest, d, e, others

    given = {"e": 7, "z": 9}
    return [f(1, 2, d=4), f(1, *[2, 3, 4], d=5, **given), f(1, b=2, d=4, **{"q": 1}), given]  # noqa: PIE804


@case
def argument_order(log: Log) -> Any:
    def f(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    return log.say("f", f)(log.say(1), *log.say("star", [2]), log.say(3), k=log.say("k"), **log.say("twice", {"m": 1}))


@case
def missing_argument(log: Log) -> Any:
    def f(a: Any, b: Any) -> Any:
        return a

    return f(1)


@case
def wrong_keyword(log: Log) -> Any:
    return log.say(1, word=2)


@case
def too_many_arguments_of_a_method(log: Log) -> Any:
    return log.say(1, 2, 3)


@case
def default_is_made_once(log: Log) -> Any:
    def f(x: Any = log.say("default", [0]), *, y: Any = log.say("kw")) -> Any:  # noqa: B008
        x.append(1)
        return list(x)

    return [f(), f(), f([5])]


@case
def closures(log: Log) -> Any:
    n = 1

    def add(x: int) -> int:
        return x + n

    n = 10
    return [add(1), (lambda y: y * n)(2), (lambda *a, k=n, **kw: (a, k, kw))(1, z=2)]


@case
def annotations_of_an_inner_function(log: Log) -> Any:
    def f(x: int, *, y: str = "a") -> list[int]:
        """It has words."""
        return [x]

    return f.__annotations__, f.__doc__, f.__name__, f.__qualname__


@case
def recursion(log: Log) -> Any:
    def down(n: int) -> list[int]:
        return [n, *down(n - 1)] if n else []

    return down(3), _factorial(5)


def _factorial(n: int) -> int:
    return 1 if n < 2 else n * _factorial(n - 1)


def _doubled(f: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(f)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return 2 * f(*args, **kwargs)

    return inner


@_doubled
def _decorated(x: int) -> int:
    return x + 1


@case
def decorated_outside(log: Log) -> Any:
    return _decorated(3), _decorated.__name__, _decorated.__qualname__


@case
def annotated_local_is_local(log: Log) -> Any:
    contextlib: Any
    return contextlib  # noqa: F821


# -- statements


@case
def annotated_attributes(log: Log) -> Any:
    box = Box(log)
    log.say("object", box).n: int
    box.m: undefined_name = log.say("value")  # type: ignore[name-defined]  # noqa: F821
    k: int = 3
    return box.m, k, hasattr(box, "n")


@case
def for_with_else(log: Log) -> Any:
    found = []
    for n in range(5):
        if n == 1:
            continue
        if n == 4:
            break
        found.append(n)
    else:
        found.append("no break")
    for _n in ():
        found.append("never")
    else:
        found.append("else")
    return found, n


@case
def while_with_else(log: Log) -> Any:
    n, found = 0, []
    while log.say(("test", n), n < 3):
        n += 1
        if n == 2:
            continue
        found.append(n)
    else:
        found.append("else")
    while True:
        break
    else:
        found.append("never")
    return found


@case
def try_in_all_its_parts(log: Log) -> Any:
    def f(error: Any) -> Any:
        try:
            log.say("try")
            if error is not None:
                raise error
        except (KeyError, IndexError) as caught:
            return f"caught {type(caught).__name__} {caught}"
        except ValueError:
            log.say("value")
        else:
            log.say("else")
        finally:
            log.say("finally")
        return "end"

    return [f(None), f(KeyError("k")), f(ValueError("v")), f(IndexError())]


@case
def finally_overrides(log: Log) -> Any:
    for _k in range(2):
        try:
            return "try"
        finally:
            log.say("finally")
    return "never"


@case
def raise_from(log: Log) -> Any:
    try:
        log.missing  # noqa: B018
    except AttributeError as error:
        raise RuntimeError(f"wrapped: {error}") from error


@case
def raise_again(log: Log) -> Any:
    try:
        raise ValueError("first")
    except ValueError:
        log.say("seen")
        raise


@case
def assertion(log: Log) -> Any:
    assert log.say("ok", True), log.say("not asked")
    assert not log.say("bad", True), f"text {log.say('asked')}"


@case
def with_a_suppressed_error(log: Log) -> Any:
    with contextlib.suppress(KeyError), threading.Lock():
        log.say("in")
        raise KeyError("x")
    return "after"


@contextlib.contextmanager
def _noted(log: Log, word: Any) -> Iterator[Any]:
    log.say(("enter", word))
    try:
        yield word
    finally:
        log.say(("exit", word))


@case
def with_generators(log: Log) -> Any:
    with _noted(log, "a") as a, _noted(log, a + "b") as b:
        log.say(b)
    with _noted(log, (1, 2)) as (x, y):
        return x + y


@case
def with_something_else(log: Log) -> Any:
    with 5:
        pass


@case
def deletes(log: Log) -> Any:
    x, d, box = [1, 2, 3], {"a": 1, "b": 2}, Box(log, n=1, m=2)
    box["k"] = 1
    y = 1
    del x[0], d["a"], box["k"], box.n, y
    del x[:1]
    return x, d, hasattr(box, "n"), y  # noqa: F821


@case
def deletes_what_is_not_there(log: Log) -> Any:
    box = Box(log)
    del box.n


@case
def unpacking(log: Log) -> Any:
    a, (b, *c), d = 1, (2, 3, 4), 5
    [e, f] = "xy"
    g = h = log.say("once", [1])
    return a, b, c, d, e, f, g is h


@case
def unpacking_to_places(log: Log) -> Any:
    box, x = Box(log), [0, 0]
    box.n, x[1], box["k"] = log.say("value", (1, 2, 3))
    i, x[i] = 0, 9
    box.m = y = box.p = log.say("shared", [1])
    return box.n, x, box.held, box.m is y is box.p


@case
def unpacking_swaps(log: Log) -> Any:
    box = Box(log, a=1, b=2)
    x = [1, 2]
    box.a, box.b = box.b, box.a
    x[0], x[1] = x[1], x[0]
    return box.a, box.b, x


@case
def unpacking_too_many(log: Log) -> Any:
    a, b = log.say("v", (1, 2, 3))
    return a, b


@case
def unpacking_to_places_too_few(log: Log) -> Any:
    box = Box(log)
    box.a, box.b = [1]


@case
def nested_targets(log: Log) -> Any:
    box = Box(log)
    box.a, (box.b, *box.c) = 1, (2, 3, 4)
    for box.d in range(3):
        pass
    return box.a, box.b, box.c, box.d


@case
def assignment_order(log: Log) -> Any:
    box = Box(log)
    log.say("target", box)[log.say("key")] = log.say("value")
    log.say("object", box).name = log.say("text")
    return box.held, box.name


@case
def augmented(log: Log) -> Any:
    n, x, box = 1, [1], Box(log, n=1)
    y = x
    n += 2
    n *= 5
    n -= 1
    n //= 2
    n **= 2
    n %= 30
    n <<= 1
    n |= 1
    n ^= 2
    n &= 0xFF
    n >>= 1
    n /= 2
    y += [2]
    box.n += 3
    x[0] += 10
    box["k"] = 1
    log.say("target", box)[log.say("key", "k")] += log.say("value", 2)
    return n, x, x is y, box.n, box.held


@case
def augmented_reads_the_left_first(log: Log) -> Any:
    box, x = Box(log, n=1), [1]

    def change() -> int:
        box.n = 100
        x[0] = 100
        return 1

    box.n += change()
    x[0] += change()
    return box.n, x


class _Twice:
    def __init__(self, n: int):
        self.n = n

    def __iadd__(self, other: Any) -> Any:
        return NotImplemented

    def __add__(self, other: Any) -> Any:
        return _Twice(self.n + 2 * other)


@case
def augmented_that_is_not_implemented(log: Log) -> Any:
    x = _Twice(1)
    x += 5
    return type(x).__name__, x.n


@case
def augmented_of_wrong_types(log: Log) -> Any:
    n = 1
    n += "a"
    return n


@case
def imports_inside(log: Log) -> Any:
    import math
    import os.path as p
    from collections import OrderedDict as Ordered

    return math.floor(2.5), p.basename("a/b"), Ordered(a=1)["a"]


@case
def import_of_nothing(log: Log) -> Any:
    from math import nothing_of_this_name

    return nothing_of_this_name


@case
def unknown_name(log: Log) -> Any:
    return log.say("a") + nowhere_defined  # type: ignore[name-defined]  # noqa: F821


@case
def name_before_assignment(log: Log) -> Any:
    if log.say("f", 0):
        x = 1
    return x


# -- classes


class Base:
    """A class to derive from."""

    kind = "base"

    def __init__(self, n: int = 0):
        self.n = n
        self.__hidden = n + 1

    def hidden(self) -> int:
        self.__hidden += 1
        return self.__hidden + sum(x + self.__hidden for x in (1, 2))

    def describe(self, *, loud: bool = False) -> str:
        return f"{self.kind} {self.n}" + ("!" if loud else "")

    @classmethod
    def made(cls, n: int) -> Any:
        return cls(n)

    @staticmethod
    def plain(n: int) -> int:
        return n * 2

    @property
    def half(self) -> float:
        return self.n / 2

    @half.setter
    def half(self, value: float) -> None:
        self.n = int(value * 2)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("dynamic_"):
            return name[8:]
        raise AttributeError(f"no {name} here")


class Derived(Base):
    """A class with calls of super."""

    kind = "derived"
    __slots__ = ("slot",)

    def __init__(self, n: int):
        super().__init__(n)
        self.slot = n

    def describe(self, **kwargs: Any) -> str:
        return "<" + super().describe(**kwargs) + ">" + super(Derived, self).kind  # noqa: UP008

    def doubled(self) -> list[str]:
        parent = super()
        return [parent.describe() for _ in range(2)]

    @classmethod
    def made(cls, n: int) -> Any:
        return super().made(n + 1)


class Odd(property):
    """A property that does more than others."""

    def __get__(self, x: Any, kind: Any = None) -> Any:
        return "odd", super().__get__(x, kind)


class Proxy:
    """Says that it is of another class."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return int

    @Odd
    def half(self) -> int:
        return 2


@case
def methods(log: Log) -> Any:
    x = Derived(3)
    return [x.hidden(), x.describe(loud=True), x.doubled(), type(x).made(4).n, x.plain(2), Base.plain(3), x.half, x.slot, Base.describe(x)]


@case
def property_is_set(log: Log) -> Any:
    x = Base(1)
    x.half = 4
    x.half += 1
    return x.n


@case
def dynamic_attributes(log: Log) -> Any:
    x = Base()
    return [x.dynamic_a, getattr(x, "dynamic_b"), getattr(x, "other", 7), hasattr(x, "other"), hasattr(x, "n")]  # noqa: B009


@case
def dynamic_attribute_that_is_not_there(log: Log) -> Any:
    return Base().other


@case
def class_as_it_says(log: Log) -> Any:
    x = Proxy()
    return x.__class__.__name__, type(x).__name__, isinstance(x, int), x.half


@case
def iterator_that_is_none(log: Log) -> Any:
    class_of = _Listed
    return [x for x in class_of()]  # noqa: C416


class _Listed:
    def __iter__(self) -> Any:
        return [1, 2]


@case
def builtins_with_callbacks(log: Log) -> Any:
    return [
        sorted([3, 1, 2], key=lambda x: log.say(("key", x), -x)),
        list(map(lambda x: x + 1, [1, 2])),  # noqa: C417
        list(filter(lambda x: log.say(("f", x), x > 1), [1, 2])),
        max([1, 2], key=lambda x: -x),
        min(3, 1, default=None) if False else 0,
        sum([[1], [2]], []),  # noqa: RUF017
        all(log.say(x, x) for x in (1, 0.0, 2)),
        functools.partial(Base.plain, 4)(),
        functools.reduce(lambda a, b: a * b, [1, 2, 3]),
        dict(a=1, **{"b": 2}),  # noqa: PIE804
        dict.fromkeys("ab", 0),
        isinstance(1, (int, str)),
        list(enumerate("ab", start=1)),
        list(reversed([1, 2])),
    ]


@case
def list_that_holds_itself(log: Log) -> Any:
    return len([x for x in _ENDLESS]), 1 in _ENDLESS  # noqa: C416


_ENDLESS: list[Any] = [1]
_ENDLESS.append(_ENDLESS)


@case
def builtins_with_wrong_arguments(log: Log) -> Any:
    said = []
    for f, args in (
        (getattr, (1,)),
        (len, ()),
        (isinstance, (1,)),
        (hasattr, (1,)),
        (next, ()),
        (bool, (1, 2)),
        (filter, (None,)),
        (map, ()),
    ):
        try:
            f(*args)
        except TypeError as error:
            said.append(str(error))
    return said


@case
def frame_is_its_own(log: Log) -> Any:
    secret = 1
    return sorted(locals()), eval("secret + 1"), secret
