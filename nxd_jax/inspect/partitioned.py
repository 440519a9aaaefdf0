"""The collectives that XLA put into an annotated program (`xr.use_spmd`), from its optimised HLO. Programs of ranks have them in the jaxpr (`collectives`)."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from nxd_jax.inspect import collectives, hlo, units
from nxd_jax.inspect.collectives import Collective
from nxd_jax.inspect.tables import Table
from torch_bridge.ir import scopes

KINDS = {
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "collective-permute": "permute",
}
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%?[\w.\-]+ = (.+?) ({'|'.join(KINDS)})(?:-start)?\(")
_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls)=%?([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}")

Groups = frozenset[frozenset[int]]


def table(text: str, axes: dict[str, int], most: int | None = 40) -> Table[Collective]:
    """The collectives of a program's optimised HLO, one row for each kind, mesh axes, dtype and place in the code, the most bytes first.

    axes: names and sizes of the mesh axes, outermost first. Groups of devices that are no lines of the mesh have no axes. A loop of known length counts every
    time round.
    """
    rows = collectives.summed(_found(text, axes))
    count, total = sum(c.count for c in rows), sum(c.bytes for c in rows)
    note = f"{units.many(count, 'collective')} of XLA's, {units.size(total)} of inputs on each core" if rows else "no core communicates"
    return Table("Collectives", rows, collectives.COLUMNS, note, most)


def _found(text: str, axes: dict[str, int]) -> Iterator[Collective]:
    bodies, entry = _computations(text)
    times = _times(bodies, entry)
    for name, lines in bodies.items():
        for line in lines:
            found = _INSTRUCTION.match(line)
            if found is None or not times.get(name):
                continue
            op = found[2]
            groups = _groups(line, axes)
            ranks = max(map(len, groups), default=1)
            if ranks < 2:
                continue
            arrays = _ARRAY.findall(found[1])
            size = sum(_bytes(kind, dims) for kind, dims in arrays)
            size = size // ranks if op == "all-gather" else size * ranks if op == "reduce-scatter" else size
            name_of = hlo.OP_NAME.search(line)
            module, at, aten, phase = hlo.place(scopes.unescaped(name_of[1]) if name_of else "")
            along = _along(groups, tuple(axes.items())) if op != "collective-permute" else ()
            yield Collective(KINDS[op], along, ranks, times[name], times[name] * size, _dtype(arrays[0][0]), module, at, aten, phase)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation by its name, and the name of the program's own."""
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head is not None:
            lines = bodies[head[2]] = []
            entry = head[2] if head[1] else entry
        else:
            lines.append(line)
    return bodies, entry


def _times(bodies: dict[str, list[str]], entry: str) -> dict[str, int]:
    """How often each computation runs."""
    times: dict[str, int] = {}

    def visit(name: str, count: int) -> None:
        times[name] = times.get(name, 0) + count
        for line in bodies.get(name, ()):
            trips = _TRIPS.search(line) if " while(" in line else None
            for called in _CALLED.findall(line):
                if called in bodies:
                    visit(called, count * int(trips[1]) if trips else count)

    visit(entry, 1)
    return times


def _groups(line: str, axes: dict[str, int]) -> Groups:
    """The groups of devices that a collective runs among, by their places on the mesh in row-major order."""
    mesh = _MESH.search(line)
    if mesh is not None:
        sizes = [int(part.partition("=")[2]) for part in mesh[1].split(",")]
        names = [part.partition("=")[0].strip(" '") for part in mesh[1].split(",")]
        ids = _iota(mesh[2], mesh[3]) if mesh[2] else np.arange(math.prod(sizes))
        chosen = [names.index(n.strip(" '")) for n in mesh[4].split(",")]
        kept = [k for k in range(len(sizes)) if k not in chosen]
        rows = ids.reshape(sizes).transpose([*kept, *chosen]).reshape(-1, math.prod(sizes[k] for k in chosen))
        return _sets(rows)
    iota = _IOTA.search(line)
    if iota is not None:
        shape = [int(n) for n in iota[1].split(",")]
        return _sets(_iota(iota[2], iota[3]).reshape(shape[0], -1))
    listed = _LISTED.search(line)
    if listed is not None:
        return frozenset(frozenset(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    return frozenset([frozenset(range(math.prod(axes.values())))])  # no groups: all devices


def _iota(shape: str, order: str | None) -> np.ndarray:
    sizes = [int(n) for n in shape.split(",")]
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return (ids if not order else ids.transpose([int(k) for k in order.split(",")])).reshape(-1)


def _sets(rows: Any) -> Groups:
    return frozenset(frozenset(int(k) for k in row) for row in rows)


@functools.lru_cache(maxsize=256)
def _along(groups: Groups, axes: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """The mesh axes whose lines these groups are; none if they are no lines."""
    sizes = [n for _, n in axes]
    names = [a for a, n in axes if n > 1]
    places = np.arange(math.prod(sizes)).reshape(sizes)
    index = {a: k for k, (a, _) in enumerate(axes)}
    for count in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, count):
            if groups == _sets(_lines(places, [index[a] for a in chosen])):
                return chosen
    return ()


def _lines(places: np.ndarray, chosen: Sequence[int]) -> np.ndarray:
    kept = [k for k in range(places.ndim) if k not in chosen]
    return places.transpose([*kept, *chosen]).reshape(-1, math.prod(places.shape[k] for k in chosen))


def _bytes(kind: str, dims: str) -> int:
    bits = int(re.search(r"\d+", kind)[0]) if re.search(r"\d+", kind) else 8  # type: ignore[index]
    return math.prod(int(n) for n in dims.split(",") if n) * max(bits, 8) // 8


_DTYPES = {"pred": "bool", "bf16": "bfloat16"}
_LETTERS = {"f": "float", "s": "int", "u": "uint", "c": "complex"}


def _dtype(kind: str) -> str:
    """XLA's name of a dtype as NumPy's."""
    return _DTYPES.get(kind) or re.sub(r"^([fsuc])(?=\d)", lambda m: _LETTERS[m[1]], kind)
