"""Numbers that differ from rank to rank, in a process that runs the script once for several ranks.

A `RankInt` (a `torch.SymInt`; `isinstance(rank, int)` holds too, `type(rank) is int` does not) holds each rank's own value, in every process of a job of
several ranks. It prints, formats, compares, counts and indexes lists as the first hosted rank's number does; next to an xla tensor it becomes each rank's
own number, also as the start of a slice, and next to a CPU tensor it gives one that differs by rank (`rank_tensor`). Where PyTorch insists on one plain
number (a size, a write to what all ranks share), it raises and says what to do, because every rank but the first would get a wrong one.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol, SupportsIndex

import torch


class PlainNumberNeeded(RuntimeError):
    """A number that differs by rank was used where PyTorch needs one number."""


class RankError(RuntimeError):
    """In strict mode: all ranks would get the first hosted rank's result."""


def strict() -> bool:
    """Whether what is rank 0's on all ranks is an error: NXD_JAX_STRICT_RANKS=1."""
    return os.environ.get("NXD_JAX_STRICT_RANKS", "0") not in ("", "0")


def report(text: str, stacklevel: int) -> None:
    """Say that all ranks get the first hosted rank's result. stacklevel: as for `warnings.warn` in the caller."""
    if strict():
        raise RankError(text)
    warnings.warn(f"{text} (NXD_JAX_STRICT_RANKS=1 makes this an error.)", stacklevel=stacklevel + 1)


_ADVICE = (
    "{who}, and this number is {values} for rank 0, 1, ...: PyTorch asked for one plain number "
    "here, as for a tensor's size, for a slice of a CPU tensor that needs gradients, or to write to a CPU tensor that all ranks share. Give all "
    "ranks one size (pad), move a tensor that is written to or needs gradients to xla first (x.to('xla')), use int(rank) if rank 0's number is meant, or start "
    "one process per rank with torchrun."
)


def refuse(values: Sequence[Any]) -> PlainNumberNeeded:
    """The error for a number with these values on the ranks where torch needs one."""
    shown = ", ".join(str(v) for v in values[:4]) + (", ..." if len(values) > 4 else "")
    from torch_bridge.mesh import world

    hosted = len(world.current().hosted)
    who = (
        f"This process runs the script once for {len(values)} ranks"
        if hosted > 1
        else f"This process is one of {world.size()}, which compile one program"
    )
    return PlainNumberNeeded(_ADVICE.format(who=who, values=shown))


class RankNode:
    """What torch asks about a symbolic number. `values`: one for each rank of the world; `first`: the first hosted rank's."""

    def __init__(self, values: tuple[Any, ...], hosted: tuple[int, ...]):
        self.values = values
        self.hosted = hosted
        self.first = values[hosted[0]]
        self.pytype = type(self.first)

    hint = property(lambda self: self.first)
    constant = None
    nested_int = staticmethod(lambda: None)
    nested_int_coeff = staticmethod(lambda: None)
    is_nested_int = staticmethod(lambda: False)
    is_symbolic = staticmethod(lambda: True)
    is_constant = staticmethod(lambda: False)
    has_hint = staticmethod(lambda: True)
    maybe_as_int = staticmethod(lambda: None)

    def is_int(self) -> bool:
        return self.pytype is int

    def is_float(self) -> bool:
        return self.pytype is float

    def is_bool(self) -> bool:
        return self.pytype is bool

    def _constant(self, value: Any) -> RankNode:
        return RankNode((value,) * len(self.values), self.hosted)

    wrap_int = wrap_float = wrap_bool = _constant

    def int_(self) -> int:
        return int(self.first)

    def float_(self) -> float:
        return float(self.first)

    def bool_(self) -> bool:
        return bool(self.first)

    def guard_int(self, file: str, line: int) -> int:
        if self._agree():
            return int(self.first)
        raise refuse(self.values)

    def guard_float(self, file: str, line: int) -> float:
        if self._agree():
            return float(self.first)
        raise refuse(self.values)

    def _agree(self) -> bool:
        return all(self.values[r] == self.first for r in self.hosted)

    def guard_bool(self, file: str, line: int) -> bool:
        """torch's own checks on bounds: they hold for all ranks or are decided as for the first."""
        return bool(self.first)

    expect_true = expect_size = guard_bool

    def statically_known_true(self, file: str, line: int) -> bool:
        """What torch takes a shorter way for, as a slice that is the whole tensor: only if it holds for all."""
        return all(self.values[r] for r in self.hosted)

    guard_size_oblivious = guard_or_false = statically_known_true

    def guard_or_true(self, file: str, line: int) -> bool:
        return any(self.values[r] for r in self.hosted)

    def str(self) -> str:
        return str(self.first)

    __str__ = __repr__ = _graph_repr = str

    def clone(self) -> RankNode:
        return self

    def sym_float(self) -> RankNode:
        return RankNode(tuple(float(v) for v in self.values), self.hosted)

    def sym_not(self) -> RankNode:
        return RankNode(tuple(not v for v in self.values), self.hosted)

    def neg(self) -> RankNode:
        return RankNode(tuple(-v for v in self.values), self.hosted)


_NODE_OPS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "mod": operator.mod, "floordiv": operator.floordiv,
    "int_floordiv": operator.floordiv, "truediv": operator.truediv, "int_truediv": operator.truediv, "float_truediv": operator.truediv,
    "pow": operator.pow, "pow_by_natural": operator.pow, "sym_min": min, "sym_max": max, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt,
    "le": operator.le, "gt": operator.gt, "ge": operator.ge, "and_": lambda a, b: a and b, "or_": lambda a, b: a or b,
    "sym_and": lambda a, b: a and b, "sym_or": lambda a, b: a or b,
}  # fmt: skip


def _node_op(fn: Callable[[Any, Any], Any]) -> Any:
    def method(self: RankNode, other: RankNode) -> RankNode:
        return RankNode(tuple(fn(a, b) for a, b in zip(self.values, other.values, strict=True)), self.hosted)

    return method


for _name, _fn in _NODE_OPS.items():
    setattr(RankNode, _name, _node_op(_fn))


def ranked(values: tuple[Any, ...], hosted: tuple[int, ...]) -> Any:
    """One value if all ranks agree; a `RankInt`, `RankFloat` or `RankBool` for numbers that differ; else the first hosted rank's."""
    first = values[hosted[0]]
    if all(v == first for v in values):
        return first
    kind = _KINDS.get(type(first))
    if kind is None:
        return first
    prepare()
    return kind(RankNode(values, hosted))


class Hooks(Protocol):
    """What the floors above do about numbers that differ by rank (`per_rank.hooks`)."""

    def prepare(self) -> None:
        """Once there is such a number: loaders that are told one give each rank its own samples, files and seeds take the first's."""

    def apply_ufunc(self, ufunc: Any, method: str, inputs: Any, kwargs: Any) -> Any:
        """A NumPy ufunc of one."""

    def array_function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any other function of NumPy's of one."""

    def torch_function(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], original: Callable[..., Any] | None = None
    ) -> Any:
        """A torch function of one."""

    def tensor_function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function of a CPU tensor that differs by rank."""

    def record(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An aten op on xla tensors with one among its arguments."""

    def filled_like(self, base: Any, size: Any, value: Any, dtype: Any) -> Any:
        """A tensor on xla full of each rank's own number."""

    def text_asked(self) -> None:
        """Its text is asked for, maybe for the name of a file."""

    def bytes_asked(self) -> None:
        """It is pickled, or its bytes are asked for."""

    def became_plain(self, values: Sequence[Any], truth: bool) -> None:
        """Python took a plain number or a truth from it."""

    def float_read(self) -> None:
        """A float that differs by rank has been read from tensors or computed."""

    def taken_as_index(self, values: Sequence[Any], hosted: Sequence[int]) -> bool:
        """A list is indexed with it; whether that is followed."""

    def seed(self, generator: torch.Generator, seed: Any, plain: Callable[[Any], Any]) -> None:
        """A random generator is seeded with it."""

    def get_state(self, generator: torch.Generator) -> torch.Tensor:
        """The state of a generator that was."""

    def set_state(self, generator: torch.Generator, state: torch.Tensor) -> None:
        """Set it."""


_load: Callable[[], Hooks] | None = None


def hooks_from(load: Callable[[], Hooks]) -> None:
    """Say where the hooks are; they are loaded when the first is needed."""
    global _load
    _load = load


@functools.cache
def hooks() -> Hooks:
    """The hooks, loaded."""
    assert _load is not None, "import torch_bridge first"
    return _load()


@functools.cache
def prepare() -> None:
    """Have torch's functions and the host's ready for numbers that differ by rank: before the first one, if it is known that there will be some. In
    `torch.manual_seed(1 + rank())` Python looks up the function before there is such a number."""
    hooks().prepare()


def values_of(x: object) -> tuple[Any, ...] | None:
    """Each rank's value of a number that may differ by rank; None for anything else, also for a number that was read (`is_item`)."""
    if isinstance(x, _Item):
        return None
    node = getattr(x, "node", None) if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)) else None
    return node.values if isinstance(node, RankNode) else None


def per_rank(x: object) -> list[Any]:
    """The value of a number for each rank of the world, in order. A plain number is the same for all."""
    from torch_bridge.mesh import world

    if is_item(x):
        return list(x.values)  # type: ignore[attr-defined]
    values = values_of(x)
    return [x] * world.size() if values is None else list(values)


def _binary(fn: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    def compute(self: Any, other: Any, swap: bool) -> Any:
        node = self.node
        others = values_of(other)
        if others is None:
            if isinstance(other, _Item):
                own = tuple(node.values[r] for r in node.hosted)
                return item(
                    tuple(fn(a, b) for a, b in (zip(other.values, own, strict=True) if swap else zip(own, other.values, strict=True)))
                )
            if not isinstance(other, (int, float)):
                return NotImplemented
            others = (other,) * len(node.values)
        left, right = (others, node.values) if swap else (node.values, others)
        return ranked(for_all(lambda r: fn(left[r], right[r]), len(left), node.hosted), node.hosted)

    return lambda self, other: compute(self, other, False), lambda self, other: compute(self, other, True)


def _unary(fn: Callable[[Any], Any]) -> Any:
    return lambda self: ranked(for_all(lambda r: fn(self.node.values[r]), len(self.node.values), self.node.hosted), self.node.hosted)


def for_all(of: Callable[[int], Any], count: int, hosted: Sequence[int]) -> tuple[Any, ...]:
    """`of(rank)` for every rank of the world. A process that is one rank alone answers for no other: where another's is an error, its own stands for all."""
    try:
        return tuple(of(r) for r in range(count))
    except (ArithmeticError, ValueError):
        if len(hosted) > 1:
            raise
        return (of(hosted[0]),) * count


def _first(convert: Callable[[Any], Any]) -> Any:
    return lambda self: convert(self.node.first)


class _Ranked:
    """What the three kinds have in common."""

    node: Any
    _is: type

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """int, float or bool, so that `isinstance` answers as for a plain number, besides `torch.SymInt` and the like."""
        return self._is

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return hooks().apply_ufunc(ufunc, method, inputs, kwargs)

    def __array_function__(self, func: Callable[..., Any], types: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return hooks().array_function(func, args, kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return hooks().torch_function(func, args, kwargs or {})

    def __hash__(self) -> int:
        return hash(self.node.first)

    def __reduce_ex__(self, proto: SupportsIndex) -> Any:
        if len(self.node.hosted) > 1:
            hooks().bytes_asked()
        return type(self.node.first), (self.node.first,)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


_OPS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "mod": operator.mod, "floordiv": operator.floordiv,
    "truediv": operator.truediv, "pow": operator.pow, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "lshift": operator.lshift, "rshift": operator.rshift, "divmod": divmod,
}  # fmt: skip
_COMPARISONS = {n: getattr(operator, n) for n in ("eq", "ne", "lt", "le", "gt", "ge")}
_CONVERSIONS: dict[str, Any] = {"__repr__": repr, "__int__": int}


def _divmod(a: Any, b: Any) -> Any:
    return a // b, a % b


def _fill(cls: Any) -> Any:
    for name, fn in _OPS.items():
        forward, backward = (_divmod, lambda a, b: _divmod(b, a)) if name == "divmod" else _binary(fn)
        setattr(cls, f"__{name}__", forward)
        setattr(cls, f"__r{name}__", backward)
    for name, fn in _COMPARISONS.items():
        setattr(cls, f"__{name}__", _binary(fn)[0])
    for name, fn in _CONVERSIONS.items():
        setattr(cls, name, _first(fn))
    for name, unary in (("neg", operator.neg), ("pos", operator.pos), ("abs", abs), ("invert", operator.invert)):
        setattr(cls, f"__{name}__", _unary(unary))
    for name, rounding in (("floor", math.floor), ("ceil", math.ceil), ("trunc", math.trunc)):
        setattr(cls, f"__{name}__", _unary(rounding))
    cls.__round__ = lambda self, digits=None: _unary(lambda v: round(v, digits))(self)
    cls.__format__ = _as_text
    cls.__str__ = _as_text
    cls.__bool__ = _truth
    cls.__float__ = _as_float
    return cls


def _as_text(self: Any, spec: str = "") -> str:
    """The first hosted rank's; `rank_file_names` looks whether a file is read by it."""
    if len(self.node.hosted) > 1:
        hooks().text_asked()
    return format(self.node.first, spec)


def _as_float(self: Any) -> float:
    """The first hosted rank's number; `branches` follows where it goes."""
    _became_plain(self.node.values, self.node.hosted)
    return float(self.node.first)


def _became_plain(values: Sequence[Any], hosted: Sequence[int]) -> None:
    if len(hosted) > 1:
        hooks().became_plain(values, truth=False)


def _truth(self: Any) -> bool:
    """The first hosted rank's answer. Where ranks differ, the branch is remembered: if tensor work depends on it, `branches` reports it."""
    values = self.node.values
    if any(bool(values[r]) != bool(self.node.first) for r in self.node.hosted):
        hooks().became_plain(values, truth=True)
    return bool(self.node.first)


def _taken_as_index(node: RankNode) -> None:
    if len(node.hosted) > 1 and not hooks().taken_as_index(node.values, node.hosted):
        _became_plain(node.values, node.hosted)


def plain(values: Sequence[Any]) -> None:
    """The caller's caller made one plain number of what has these values on the hosted ranks."""
    if any(v != values[0] for v in values):
        _became_plain(values, range(len(values)))


def asked_for_index(values: tuple[int, ...]) -> None:
    """The caller's caller asked for one index, and gets the first of the hosted ranks' values."""
    if not hooks().taken_as_index(values, range(len(values))):
        _became_plain(values, range(len(values)))


@_fill
class RankInt(_Ranked, torch.SymInt):
    """An int for each rank (`xm.get_ordinal()`, `get_tensor_model_parallel_rank()`, and arithmetic on them)."""

    _is = int

    def __index__(self) -> int:
        _taken_as_index(self.node)
        return int(self.node.first)

    def __hash__(self) -> int:
        _taken_as_index(self.node)
        return hash(self.node.first)

    def bit_length(self) -> int:
        return int(self.node.first).bit_length()

    def to_bytes(self, *args: Any, **kwargs: Any) -> bytes:
        """The first hosted rank's, as text is."""
        if len(self.node.hosted) > 1:
            hooks().bytes_asked()
        return int(self.node.first).to_bytes(*args, **kwargs)


@_fill
class RankFloat(_Ranked, torch.SymFloat):
    """A float for each rank."""

    _is = float

    def is_integer(self) -> bool:
        return float(self.node.first).is_integer()


@_fill
class RankBool(_Ranked, torch.SymBool):
    """A truth value for each rank: what comparing a `RankInt` gives."""

    _is = bool

    def __index__(self) -> int:
        _taken_as_index(self.node)
        return int(self.node.first)


def _truth_as_int(self: RankBool) -> int:
    """`int(rank == 0)`: the first hosted rank's; unlike `int(rank)`, which says that it is meant, it is followed."""
    _became_plain(self.node.values, self.node.hosted)
    return int(self.node.first)


RankBool.__int__ = _truth_as_int  # type: ignore[method-assign, assignment]


class _Item:
    """A number read from a tensor whose value differs among the hosted ranks: the first one's, which also remembers the others'.

    Arithmetic with numbers keeps all of them, `xm.mesh_reduce` and object collectives give each rank's own, and next to an xla tensor each rank
    uses its own.
    """

    values: tuple[Any, ...]
    __array_ufunc__ = _Ranked.__array_ufunc__
    __array_function__ = _Ranked.__array_function__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return hooks().torch_function(func, args, kwargs or {})

    def plain(self) -> Any:
        """The first hosted rank's number alone."""
        return self.values[0]

    def item(self) -> Any:
        """As NumPy's numbers have it: `array.mean().item()`."""
        return item(tuple(v.item() if hasattr(v, "item") else v for v in self.values))

    tolist = item

    def __reduce_ex__(self, proto: SupportsIndex) -> Any:
        hooks().bytes_asked()
        return type(self.values[0]), (self.values[0],)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


def _item_op(fn: Callable[[Any, Any], Any], swap: bool) -> Any:
    def method(self: Any, other: object) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        ranked_values = values_of(other)
        if ranked_values is not None:
            numbers: Any = other
            others: tuple[Any, ...] = tuple(ranked_values[r] for r in numbers.node.hosted)
        else:
            others = other.values if isinstance(other, _Item) else (other,) * len(self.values)
        pairs = zip(others, self.values, strict=True) if swap else zip(self.values, others, strict=True)
        return item(tuple(fn(a, b) for a, b in pairs))

    return method


def _arithmetic(cls: Any) -> Any:
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        setattr(cls, f"__{name}__", _item_op(_OPS[name], False))
        setattr(cls, f"__r{name}__", _item_op(_OPS[name], True))
    cls.__neg__ = lambda self: item(tuple(-v for v in self.values))
    cls.__abs__ = lambda self: item(tuple(abs(v) for v in self.values))
    cls.__round__ = lambda self, digits=None: item(tuple(round(v, digits) for v in self.values))
    for name, fn in _COMPARISONS.items():
        setattr(cls, f"__{name}__", _item_op(fn, False))
    cls.__bool__ = lambda self: bool(_truths(tuple(map(bool, self.values))))
    cls.__float__ = _item_as_float
    return cls


def _item_as_float(self: Any) -> float:
    _became_plain(self.values, range(len(self.values)))
    return float(self.values[0])


@_arithmetic
class FloatItem(_Item, float):
    """`loss.item()` of a loss that differs among ranks."""

    def __hash__(self) -> int:
        return hash(self.values[0])

    def __int__(self) -> int:
        plain([int(v) if math.isfinite(v) else v for v in self.values])
        return int(self.values[0])

    def __format__(self, spec: str) -> str:
        """The first hosted rank's; it is looked whether a number is made of it again."""
        hooks().text_asked()
        return format(float(self.values[0]), spec)

    def __str__(self) -> str:
        hooks().text_asked()
        return str(float(self.values[0]))


@_arithmetic
class IntItem(_Item, RankInt):
    """The same for integers. No `int` to C code, which would not ask it: a list indexed with one gives all ranks the first one's element, and says so."""

    def __init__(self, first: int):
        """`values` says what it is."""

    @property
    def node(self) -> RankNode:
        """For torch, and for those who ask for one index. Of ranks of other processes nothing is known; nobody asks for them."""
        from torch_bridge.mesh import world

        hosted = world.current().hosted
        known = dict(zip(hosted, self.values, strict=True))
        return RankNode(tuple(known.get(r, self.values[0]) for r in range(world.size())), tuple(hosted))

    __hash__ = RankInt.__hash__
    __trunc__ = _Item.plain

    def __int__(self) -> int:
        plain(self.values)
        return int(self.values[0])

    def __repr__(self) -> str:
        return repr(self.values[0])

    def __format__(self, spec: str) -> str:
        """As that of a float."""
        hooks().text_asked()
        return format(self.values[0], spec)

    def __str__(self) -> str:
        hooks().text_asked()
        return str(self.values[0])


def item(values: tuple[Any, ...]) -> Any:
    """A Python number from each hosted rank's value (in order): plain if they agree."""
    first = values[0]
    if not isinstance(first, (int, float)) or all(v == first or (v != v and first != first) for v in values):
        return first
    if isinstance(first, bool):
        return _truths(values)
    prepare()
    made: Any = FloatItem(first) if isinstance(first, float) else IntItem(first)
    made.values = values
    if isinstance(first, float):
        hooks().float_read()
    return made


def _truths(values: tuple[bool, ...]) -> Any:
    """A truth value for each hosted rank, so that a branch on it is noticed. (Those of other processes' ranks are not known; nothing asks for them.)"""
    from torch_bridge.mesh import world

    hosted = world.current().hosted
    known = dict(zip(hosted, values, strict=True))
    return ranked(tuple(known.get(r, values[0]) for r in range(world.size())), hosted)


def own(x: object, place: int) -> Any:
    """What the hosted rank at this place sees of a number."""
    from torch_bridge.mesh import world

    if isinstance(x, _Item):
        return x.values[place]
    values = values_of(x)
    return x if values is None else values[world.current().hosted[place]]


def first(x: Any) -> Any:
    """The first hosted rank's number, of one that differs by rank; anything else as it is."""
    if is_item(x):
        return x.plain()
    return x.node.first if values_of(x) is not None else x


def is_item(x: object) -> bool:
    """True for a number read from a tensor that differs among ranks."""
    return isinstance(x, _Item)


def is_ranked(x: object) -> bool:
    """True for a number that differs by rank, symbolic or read from a tensor."""
    return values_of(x) is not None or is_item(x)


_KINDS: dict[type, Any] = {int: RankInt, float: RankFloat, bool: RankBool}
KINDS = (*_KINDS.values(), FloatItem, IntItem)
