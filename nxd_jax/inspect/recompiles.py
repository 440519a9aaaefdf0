"""Every program that was made in this process, and for each that resembles an earlier one why that one would not do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nxd_jax.inspect import nodes, units
from nxd_jax.inspect.differences import Difference, differences
from nxd_jax.inspect.nodes import Node
from nxd_jax.inspect.owners import Owner, owners
from nxd_jax.inspect.subjects import names_of
from nxd_jax.inspect.tables import Column, Table
from torch_bridge.compiler.history import Compilation
from torch_bridge.runtime import session

ALIKE = 0.5
"""Share of the smaller one's ops from which a program counts as another form of an earlier one."""

LEAST = 2
"""Ops that two forms of a program have in common at least."""


@dataclass(frozen=True)
class Compiled:
    """A program that was made.

    number: counts from 1 in this process. step: marks of the script before it. ops: aten ops. seconds: tracing, lowering, compiling. line: 'file.py:12' of its
    last op. like: number of the earlier program that it resembles, None for a first one. why: what differs from that.
    """

    number: int
    step: int
    ops: int
    seconds: float
    line: str
    like: int | None
    why: tuple[Difference, ...]

    @property
    def reason(self) -> str:
        """`why` in one line."""
        if self.like is None:
            return "first of its kind"
        return "; ".join(map(str, self.why)) or "no difference found"

    def __str__(self) -> str:
        head = f"program {self.number} ({self.ops} ops up to {self.line or 'an unknown line'}, made in step {self.step} in {self.seconds:.2f} s)"
        if self.like is None:
            return f"{head}: {self.reason}"
        lines = [f"{d}: {d.advice}" if d.advice else str(d) for d in self.why] or [self.reason]
        return "\n".join([f"{head} is like program {self.like}, but:", *(f"  {line}" for line in lines)])

    def __repr__(self) -> str:
        return str(self)


_COLUMNS = (
    Column("program", "number", number=True),
    Column("step", "step", number=True),
    Column("ops", "ops", number=True),
    Column("seconds", "seconds", lambda s: f"{s:.2f}", number=True),
    Column("ends at", "line"),
    Column("like", "like", number=True),
    Column("why", "reason"),
)


def recompiles(again_only: bool = False) -> Table[Compiled]:
    """Every program made so far (the last `torch_bridge.compiler.history.KEPT`), oldest first, and why.

    again_only: only those that resemble an earlier one. What differs is worked out here; a step that runs as before pays nothing for it.
    """
    found = list(_compiled())
    again = [c for c in found if c.like is not None]
    note = f"{units.many(len(found), 'program')}, {len(again)} of them made again for a reason that is given"
    return Table("Compilations", again if again_only else found, _COLUMNS, note, 40)


def why() -> Compiled:
    """The program that was made last again, and why. Raises ValueError if nothing was."""
    again = recompiles(again_only=True)
    if not again.rows:
        raise ValueError("no program of this process resembles an earlier one: nothing was compiled again")
    return again[-1]


def _compiled() -> Iterator[Compiled]:
    earlier: list[tuple[Compilation, Counter[Any]]] = []
    of: dict[int, Counter[Any]] = {}
    known = owners()
    for c in list(session.current().history.compilations):
        ops = Counter((n[0].op, s.module, s.line, s.backward) for n, s in zip(c.nodes, c.sources, strict=False))
        like = max(
            (e for e, other in earlier if _alike(ops, other)),
            key=lambda e: (_share(ops, of[e.number]), _same_shapes(e, c), e.number),
            default=None,
        )
        source = next((s for s in reversed(c.sources) if s.file), None)
        yield Compiled(
            number=c.number,
            step=c.step,
            ops=len(c.nodes),
            seconds=c.seconds,
            line=source.where if source else "",
            like=None if like is None else like.number,
            why=() if like is None else tuple(between(like, c, known)),
        )
        earlier.append((c, ops))
        of[c.number] = ops


def _same_shapes(a: Compilation, b: Compilation) -> int:
    """How many ops have a counterpart with results of the same shapes."""
    one, two = (Counter((n[0].op, s.line, n[0].outs) for n, s in zip(x.nodes, x.sources, strict=False)) for x in (a, b))
    return sum((one & two).values())


def _alike(a: Counter[Any], b: Counter[Any]) -> bool:
    common = sum((a & b).values())
    return common >= LEAST and common >= ALIKE * min(sum(a.values()), sum(b.values()))


def _share(a: Counter[Any], b: Counter[Any]) -> float:
    return sum((a & b).values()) / max(sum(a.values()), sum(b.values()), 1)


def between(before: Compilation, after: Compilation, known: dict[int, Owner] | None = None) -> list[Difference]:
    """Why the program of one compilation does not do for the other. known: owners of storages, which give inputs their names."""
    found = list(_around(before, after))
    old, new = before.graph(), after.graph()
    origins = {n.name: n.meta["origin"] for n in new.nodes if n.meta.get("origin")}
    program = after.program()
    names = {} if program is None else names_of(program, owners() if known is None else known)
    rows = nodes.table(old).rows, nodes.table(new, names).rows
    modes = _modes(before, rows[0]), _modes(after, rows[1])
    return found + differences(*rows, after.reads, origins, modes) or list(_same_ops(before, after))


def _modes(of: Compilation, rows: Sequence[Node]) -> dict[str, bool]:
    """Whether each module was in training mode, of the model that the graph is of."""
    used = {n.module for n in rows if n.module}
    return max(of.modes, key=lambda found: len(used & found.keys()), default={})


def _around(before: Compilation, after: Compilation) -> Iterator[Difference]:
    if before.axes != after.axes:
        yield Difference("ranks", "the mesh", str(before.axes or "one rank"), str(after.axes or "one rank"))
    if before.mode != after.mode:
        yield Difference(
            "precision", "the precision", str(before.mode), str(after.mode), advice="set by XLA_USE_BF16, NEURON_CC_FLAGS and the like"
        )


def _same_ops(before: Compilation, after: Compilation) -> Iterator[Difference]:
    """What else a program is made for, when the ops, their arguments and inputs are the same."""
    if before.outs != after.outs:
        kept, dropped = ([v for v in a.outs if v not in b.outs] for a, b in ((after, before), (before, after)))
        at = _producer(after, kept[0]) if kept else _producer(before, dropped[0])
        more = f"{len(before.outs)} results are kept", f"{len(after.outs)} results are kept"
        yield Difference(
            "results",
            "the tensors that are alive at the end of the step",
            *more,
            *at,
            "a tensor that Python still refers to is a result: del it",
        )
    elif before.labels != after.labels:
        changed = (
            [i for i, (a, b) in enumerate(zip(before.labels[0], after.labels[0], strict=False)) if a != b]
            if before.labels and after.labels
            else []
        )
        if changed:
            i = changed[0]
            yield Difference("sharding", f"how input {i} lies among the ranks", str(before.labels[0][i]), str(after.labels[0][i]))
        else:
            yield Difference("sharding", "how a result lies among the ranks", "as inferred", "as its tensor wants")
    elif changed := [i for i, (a, b) in enumerate(zip(before.donate, after.donate, strict=False)) if a != b]:
        i = changed[0]
        words = {True: "taken over", False: "kept, for something else still refers to it"}
        leaf = after.leaves[i]
        what = f"the memory of input {i} ({leaf.dtype}[{', '.join(map(str, leaf.shape))}])"
        yield Difference("memory", what, words[before.donate[i]], words[after.donate[i]])
    else:
        yield from _numbers(before, after)


def _numbers(before: Compilation, after: Compilation) -> Iterator[Difference]:
    for kind, values in after.numbers.items():
        old = before.numbers.get(kind)
        if old is not None and len(old) == len(values) and len(set(old.tolist())) != len(set(values.tolist())):
            counts = f"{len(set(old.tolist()))} different values", f"{len(set(values.tolist()))} different values"
            yield Difference(
                "numbers", f"Python {kind.__name__}s that were equal", *counts, advice="compiled once for numbers that go their own ways"
            )


def _producer(of: Compilation, value: int) -> tuple[str, str]:
    """Module and line of the op that gives a value."""
    first = 0
    for node, source in zip(of.nodes, of.sources, strict=False):
        first += node[0].n_outs
        if value < first:
            return source.module, source.where
    return "", ""
