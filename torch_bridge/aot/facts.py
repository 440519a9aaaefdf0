"""What is known of a traced program without its code: names, shapes and dtypes of what goes in and comes out. Kept in model files as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

Tree = Any
"""A structure with an int for each tensor: {"tuple" | "list": [...]}, {"dict": [[key, ...], ...]}, {"tensor": i} or {"value": a constant}."""

Initial = torch.Tensor | Mapping[int, torch.Tensor]
"""What a program begins with under a name: one value for all ranks, or each rank's own by its number, for those that the process hosted which traced it."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A rank's tensor. name: as the module has it, or the argument. dtype: torch's."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes on a rank."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Heads:
    """Attention heads, of which ranks hold copies, or zeros besides. query, kv: the model's. of_kv: whether the tensor is of K/V heads. strategy: what is done
    with fewer K/V heads than ranks, by name; None: what the rule for their numbers says."""

    query: int
    kv: int
    of_kv: bool
    strategy: str | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """A full tensor that lies with others below each other, and is shared out by itself.

    size: its entries along the cut's dim. multiple: at its end are as many entries of `fill` as make it a multiple of this times the parts; 0: the parts must
    divide it. heads: what the entries are of, where parts are more than that.
    """

    size: int
    multiple: int = 0
    fill: float = 0.0
    heads: Heads | None = None


@dataclasses.dataclass(frozen=True)
class Cut:
    """How ranks share out a full weight: `parts` parts along `dim`, each with its part of every piece. index: the part that each rank holds; with fewer parts
    than ranks some hold the same. numbers: it is no weight but the ranks' own numbers, `index`."""

    dim: int
    parts: int
    pieces: tuple[Piece, ...]
    index: tuple[int, ...]
    numbers: bool = False


@dataclasses.dataclass(frozen=True)
class Held(Tensor):
    """What stays on the device: a weight or a state. shared: all ranks have the same values. cuts: how ranks share it out, where that is known: along one dim,
    or along several (of experts), innermost ranks first."""

    shared: bool = True
    cuts: tuple[Cut, ...] = ()


@dataclasses.dataclass(frozen=True)
class IndexCheck:
    """A result by which a program says which of an op's indices are out of range: int64 [3], how many, the first of them, and its place among all.

    low, end, ignored: what is allowed, `low` to `end - 1` and `ignored`; of: what they index, in words. source: the op's line. shape, dtype: of the indices.
    selected: the indices are a mask: whether it selects a wrong number of places, that number, and 0.
    """

    op: str
    source: str
    low: int
    end: int
    ignored: int | None
    of: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    selected: bool = False


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The ranks that a program was traced for. axes: mesh axes, outermost first; order: the ranks in row-major order over them."""

    axes: dict[str, int]
    order: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many."""
        return len(self.order)

    @property
    def places(self) -> tuple[int, ...]:
        """Each rank's place in row-major order over the axes."""
        found = [0] * self.size
        for place, rank in enumerate(self.order):
            found[rank] = place
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class Facts:
    """A program's signature.

    inputs: in order. weights, states: names of what it takes from the device, in order; `updated` are the states that it gives back, in order. results: the
    tensors that it returns, and `outs` the structure they stand in. draws: rows of random seeds that it takes. checks: of indices, results behind the others.
    """

    ranks: Ranks
    inputs: tuple[Tensor, ...]
    weights: tuple[Held, ...]
    states: tuple[Held, ...]
    results: tuple[Tensor, ...]
    outs: Tree
    draws: int
    checks: tuple[IndexCheck, ...] = ()

    @property
    def route(self) -> str:
        """The text by which a call finds its program: `(name: [shape], ...)`."""
        return route((t.name, t.shape) for t in self.inputs)


def route(inputs: Any) -> str:
    """`(name: [shape], ...)` of (name, shape) pairs."""
    return f"({', '.join(f'{name}: {list(shape)}' for name, shape in inputs)})"


# -- structures --------------------------------------------------------------------------------------


def tree_of(structure: Any, index: Any, what: str = "a traced forward returns") -> Tree:
    """The structure of a result. index: gives a leaf's number if it is a tensor, None for other leaves. what: begins what an error says."""
    number = index(structure)
    if number is not None:
        return {"tensor": number}
    if isinstance(structure, dict):  # transformers' results too
        for key in structure:
            if not isinstance(key, (str, int)):
                raise ValueError(f"{what} a dict with key {key!r}: keys must be strings or integers")
        return {"dict": [[key, tree_of(value, index, what)] for key, value in structure.items()]}
    if isinstance(structure, (tuple, list)):
        return {"tuple" if isinstance(structure, tuple) else "list": [tree_of(x, index, what) for x in structure]}
    if structure is None or isinstance(structure, (bool, int, float, str)):
        return {"value": structure}
    raise no_structure(type(structure).__name__, what)


def no_structure(kind: str, what: str = "a traced forward returns") -> ValueError:
    """For a structure of another kind."""
    return ValueError(
        f"{what} {kind}: only tensors, constants, and tuples, lists and dicts of them can be made again without the model's code"
    )


def build(tree: Tree, tensors: Any) -> Any:
    """The structure again, with `tensors[i]` for tensor i."""
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "value":
        return content
    if kind == "dict":
        return {key: build(value, tensors) for key, value in content}
    parts = [build(x, tensors) for x in content]
    return tuple(parts) if kind == "tuple" else parts


# -- JSON --------------------------------------------------------------------------------------------


def to_json(facts: Facts) -> dict[str, Any]:
    """As plain values."""
    return {
        "axes": list(facts.ranks.axes.items()),
        "order": list(facts.ranks.order),
        "inputs": [_tensor(t) for t in facts.inputs],
        "weights": [_tensor(t) for t in facts.weights],
        "states": [_tensor(t) for t in facts.states],
        "results": [_tensor(t) for t in facts.results],
        "outs": facts.outs,
        "draws": facts.draws,
        "checks": [dataclasses.asdict(check) | {"dtype": _name(check.dtype)} for check in facts.checks],
    }


def from_json(found: dict[str, Any]) -> Facts:
    """The other way. Raises KeyError, TypeError or ValueError for what `to_json` did not write."""
    return Facts(
        Ranks({str(a): int(n) for a, n in found["axes"]}, tuple(int(r) for r in found["order"])),
        tuple(Tensor(**_read(t)) for t in found["inputs"]),
        tuple(Held(**_read(t)) for t in found["weights"]),
        tuple(Held(**_read(t)) for t in found["states"]),
        tuple(Tensor(**_read(t)) for t in found["results"]),
        found["outs"],
        int(found["draws"]),
        tuple(_check(**check) for check in found["checks"]),
    )


def _tensor(t: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {"name": t.name, "shape": list(t.shape), "dtype": _name(t.dtype)}
    if isinstance(t, Held):
        found |= {"shared": t.shared, "cuts": [dataclasses.asdict(cut) for cut in t.cuts]}
    return found


def _read(found: dict[str, Any]) -> dict[str, Any]:
    more = {}
    if "shared" in found:
        more = {"shared": bool(found["shared"]), "cuts": tuple(_cut(**cut) for cut in found["cuts"])}
    return {"name": str(found["name"]), "shape": tuple(int(n) for n in found["shape"]), "dtype": _dtype(found["dtype"]), **more}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


def _check(shape: list[int], dtype: str, **more: Any) -> IndexCheck:
    return IndexCheck(shape=tuple(int(n) for n in shape), dtype=_dtype(dtype), **more)


def _cut(dim: int, parts: int, pieces: list[dict[str, Any]], index: list[int], numbers: bool) -> Cut:
    return Cut(int(dim), int(parts), tuple(_piece(**piece) for piece in pieces), tuple(int(i) for i in index), bool(numbers))


def _piece(size: int, multiple: int, fill: float, heads: dict[str, Any] | None) -> Piece:
    return Piece(int(size), int(multiple), float(fill), None if heads is None else Heads(**heads))
