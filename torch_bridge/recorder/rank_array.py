"""NumPy arrays that differ by rank, in a process that runs the script once for several ranks.

`np.arange(2.0) + rank`, `np.random.randn(3)` after `np.random.seed(seed + rank)` and `tensor.numpy()` of a CPU tensor that differs by rank are a
`RankArray`: one array for each hosted rank. NumPy's functions and methods work on each; torch makes a CPU tensor of it that differs by rank. What reads its
memory in any other way gets the first hosted rank's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np
import torch

from torch_bridge.mesh import rank_numbers, world
from torch_bridge.recorder import first_rank_files
from torch_bridge.script import rank_branches, rank_indexing


class RankArray(np.ndarray[Any, Any]):
    """An array for each hosted rank. It is a view of the first one. parts: all, alike in shape and dtype."""

    parts: list[np.ndarray[Any, Any]]

    def __array_finalize__(self, source: object) -> None:
        """Views that NumPy makes by itself are the first rank's alone."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return apply_ufunc(ufunc, method, inputs, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return on_each(func, args, kwargs)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        return rank_numbers.hooks().torch_function(func, args, kwargs or {})

    def view(self, *args: Any, **kwargs: Any) -> Any:
        """Each rank's as another dtype; a view as another class is the first one's."""
        parts = self.__dict__.get("parts")
        kind = args[0] if args else kwargs.get("dtype", kwargs.get("type"))
        if parts is None or (isinstance(kind, type) and issubclass(kind, np.ndarray)):
            return super().view(*args, **kwargs)
        return made([p.view(*args, **kwargs) for p in parts])

    def __iter__(self) -> Any:
        return (self[k] for k in range(len(self)))

    def __bool__(self) -> bool:
        return bool(rank_numbers.item(tuple(bool(p) for p in _parts(self))))

    def __repr__(self) -> str:
        return repr(_parts(self)[0])

    def __str__(self) -> str:
        return str(_parts(self)[0])

    def tobytes(self, *args: Any, **kwargs: Any) -> bytes:
        """The first hosted rank's, as text is."""
        rank_branches.note_bytes()
        return _parts(self)[0].tobytes(*args, **kwargs)

    def __reduce__(self) -> Any:
        rank_branches.note_bytes()
        first_rank_files.note(f"an array of shape {list(self.shape)} that is different on each rank")
        return _parts(self)[0].__reduce__()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.__reduce__()

    def __copy__(self) -> Any:
        return made([p.copy() for p in _parts(self)])

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__copy__()


_NUMPYS = (os.path.dirname(np.__file__) + os.sep,)


def _parts(x: np.ndarray[Any, Any]) -> Sequence[np.ndarray[Any, Any]]:
    """Each rank's array; of a view that NumPy made by itself the first rank's, for all."""
    found = x.__dict__.get("parts") if isinstance(x, RankArray) else None
    return [x.view(np.ndarray)] * _count() if found is None else found


def _count() -> int:
    return len(world.current().hosted)


def is_ranked(x: object) -> bool:
    """Whether this is an array that differs by rank."""
    return isinstance(x, RankArray)


def own(x: Any, place: int) -> Any:
    """What the hosted rank at this place has of an array; other things as they are, lists with theirs."""
    if isinstance(x, RankArray):
        return _parts(x)[place]
    if isinstance(x, (list, tuple)) and type(x) in (list, tuple):
        return type(x)(own(v, place) for v in x)
    if isinstance(x, dict):
        return {k: own(v, place) for k, v in x.items()}
    if isinstance(x, slice):
        return slice(*(rank_numbers.own(end, place) for end in (x.start, x.stop, x.step)))
    if isinstance(x, torch.Tensor):
        parts = getattr(x, "parts", None)
        return x if parts is None else parts[place]
    return rank_numbers.own(x, place)


def made(parts: Sequence[Any]) -> Any:
    """One result for what each rank got of NumPy: an array that differs by rank, a number, or lists of them."""
    first = parts[0]
    if isinstance(first, np.ndarray):
        if len(parts) == 1 or all(p is first for p in parts):
            return first
        kinds = {(p.shape, p.dtype) for p in parts}
        if len(kinds) > 1:
            shown = ", ".join(f"{p.dtype}{list(p.shape)}" for p in parts[:4])
            raise rank_numbers.PlainNumberNeeded(
                f"This process runs the script once for {len(parts)} ranks, and an array would be {shown} for rank 0, 1, ...: give all ranks one shape, use "
                "int(rank) if rank 0's number is meant, or start one process per rank with torchrun."
            )
        found = first.view(RankArray)
        found.parts = list(parts)
        rank_indexing.note_array(_NUMPYS, first.dtype.kind in "bi")
        return found
    if isinstance(first, tuple) and len({len(p) for p in parts}) == 1:
        row = (made(row) for row in zip(*parts, strict=True))
        return type(first)(*row) if hasattr(first, "_fields") else tuple(row)
    if isinstance(first, dict) and all(isinstance(p, dict) and p.keys() == first.keys() for p in parts):
        return {key: made([p[key] for p in parts]) for key in first}
    if isinstance(first, np.generic) and all(type(p) is type(first) and p == first for p in parts):
        return first
    return nested([p.item() if isinstance(p, np.generic) and not isinstance(p, float) else p for p in parts])  # np.float64 is a float


def nested(parts: Sequence[Any]) -> Any:
    """One nested list of numbers for each rank's; what is no number and differs is the first rank's."""
    first = parts[0]
    if isinstance(first, list) and all(isinstance(p, list) and len(p) == len(first) for p in parts):
        return [nested(row) for row in zip(*parts, strict=True)]
    return rank_numbers.item(tuple(parts)) if isinstance(first, (bool, int, float)) else first


def on_each(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A function of NumPy's for each hosted rank. A file gets the first one's.

    Raises PlainNumberNeeded for a write to an array that all ranks share: the last one's would be there.
    """
    name = getattr(func, "__name__", "")
    if name in _FILES and func.__module__ == "numpy":
        first_rank_files.note("an array or a number that is different on each rank")
        return func(*own(tuple(args), 0), **own(dict(kwargs), 0))
    written = kwargs.get("out", args[0] if name in _WRITES and func.__module__ == "numpy" and args else None)
    if isinstance(written, np.ndarray) and not isinstance(written, RankArray):
        raise _shared(name)
    return made([func(*own(tuple(args), place), **own(dict(kwargs), place)) for place in range(_count())])


def apply_ufunc(ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A ufunc of arrays or numbers that differ by rank. Raises PlainNumberNeeded for a write to an array that all ranks share."""
    outs = kwargs.get("out", ())
    if any(not isinstance(o, RankArray) for o in outs if o is not None):
        raise _shared(ufunc.__name__)
    found = on_each(getattr(ufunc, method), inputs, kwargs)
    return outs[0] if len(outs) == 1 and outs[0] is not None else found


_FILES = {"save", "savez", "savez_compressed", "savetxt"}
"""Functions of NumPy's that write files."""
_WRITES = {"copyto", "put", "place", "putmask", "put_along_axis", "fill_diagonal"}
"""Those that write to their first argument."""


def _shared(name: str) -> rank_numbers.PlainNumberNeeded:
    return rank_numbers.PlainNumberNeeded(
        f"numpy.{name} would write values that differ by rank to an array that all {_count()} ranks of this process share: make a new array "
        "(a = a + rank), or start one process per rank with torchrun."
    )


def _method(name: str) -> Any:
    original = getattr(np.ndarray, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "parts" not in self.__dict__:
            return original(self, *args, **kwargs)
        found = [original(part, *own(args, place), **own(kwargs, place)) for place, part in enumerate(self.parts)]
        return found[0] if found[0] is None else made(found)

    method.__name__ = name
    return method


def _attribute(name: str) -> Any:
    return property(lambda self: made([getattr(p, name) for p in _parts(self)]))


_OWN = {"__getitem__", "__setitem__", "__delitem__"}
_PLAIN = {"data", "ctypes", "dump", "dumps", "tofile", "tobytes", "getfield", "setflags", "byteswap", "view", "newbyteorder"}
"""`view` has its own."""
for _name in dir(np.ndarray):
    if (not _name.startswith("_") or _name in _OWN) and _name not in _PLAIN and callable(getattr(np.ndarray, _name)):
        setattr(RankArray, _name, _method(_name))
for _name in ("T", "real", "imag", "mT"):
    if hasattr(np.ndarray, _name):
        setattr(RankArray, _name, _attribute(_name))
