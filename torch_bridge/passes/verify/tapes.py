"""Rules of a tape that is played: its nodes stand in the segment as they would have been recorded there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch_bridge.ir.layout import Layout
from torch_bridge.ir.segment import Segment
from torch_bridge.passes.verify import report
from torch_bridge.passes.verify.segments import Aval, leaf_aval, read_first, template

AFTER = "replay"
Node = tuple[Any, ...]


class Played(NamedTuple):
    """What a tape says: its nodes with their own ids, how many values they make, the views that its externals are, which nodes have numbers and draws, and
    the layout of every storage that it writes or view that it leaves, with the value."""

    nodes: Sequence[Node]
    values: int
    externals: Sequence[Layout]
    numbers: Sequence[tuple[int, tuple[Any, ...]]]
    draws: Sequence[int]
    left: Sequence[tuple[Layout, int]]
    sources: Sequence[Any]


def check(segment: Segment, played: Played, placed: Sequence[Node], base: int, ids: Sequence[int]) -> None:
    """Raise `VerificationError` for the first rule that a tape breaks, or the nodes that it becomes in a segment which had `base` results.

    ids: of its externals there."""
    _Check(segment, played, base, ids).run(placed)


class _Check:
    """avals: shape and dtype of the tape's own values so far; given: of its externals."""

    def __init__(self, segment: Segment, played: Played, base: int, ids: Sequence[int]):
        self.played, self.base, self.ids = played, base, ids
        self.avals: list[Aval | None] = []
        outs = [o for node in segment.nodes for o in node[0].outs]
        if len(outs) != base:
            report.fail(AFTER, "a tape begins where the segment ends", f"at value {base} with {len(outs)} results")
        self.given = [leaf_aval(segment, -v - 1) if v < 0 else _aval(outs[v]) for v in ids]

    def fail(self, rule: str, found: str, k: int | None = None) -> None:
        report.fail(AFTER, rule, found, "" if k is None else report.in_segment(self.played.nodes, self.played.sources, k))

    def run(self, placed: Sequence[Node]) -> None:
        played = self.played
        if self.given != [_aval(view) for view in played.externals]:
            self.fail(
                "a tape is played on tensors of the shapes and dtypes that it was recorded on", f"{self.given} for {list(played.externals)}"
            )
        if len(placed) != len(played.nodes):
            self.fail("all nodes of a tape are played", f"{len(placed)} of {len(played.nodes)}")
        for k, (node, own) in enumerate(zip(placed, played.nodes, strict=True)):
            self._node(k, node, own)
        if len(self.avals) != played.values:
            self.fail("a tape makes as many values as it says", f"{len(self.avals)} for {played.values}")
        numbers = dict(played.numbers)
        for k, (entry, *_) in enumerate(played.nodes):
            if tuple(map(type, numbers.get(k, ()))) != template(entry)[2] or entry.rng != (k in played.draws):
                self.fail("a tape has the numbers and draws of its nodes", f"{numbers.get(k, ())}, draws {list(played.draws)[:10]}", k)
        for of, value in played.left:
            if not -len(self.ids) <= value < len(self.avals) or self._value(value) != _aval(of):
                self.fail("a tape leaves values of the shape and dtype of their storages and views", f"value {value} for {of}")

    def _node(self, k: int, node: Node, own: Node) -> None:
        (entry, *found), (recorded, *given) = node, own
        if entry is not recorded:
            self.fail("a tape is played node for node", str(entry.op), k)
        if any(not -len(self.ids) <= r < len(self.avals) for r in given):
            self.fail("a node of a tape reads an external or an earlier value", f"{given} with {len(self.avals)} values before", k)
        if found != [self.base + r if r >= 0 else self.ids[-r - 1] for r in given]:
            self.fail("values of a tape are counted from where it is played", f"{found} for {given} from {self.base} on", k)
        reads = tuple(map(self._value, given))
        known = read_first(entry)
        if known is not None and known != reads:
            self.fail("an op reads the shapes and dtypes that it was recorded for", f"{reads} for {known}", k)
        self.avals += map(_aval, entry.outs)

    def _value(self, r: int) -> Aval | None:
        return self.avals[r] if r >= 0 else self.given[-r - 1]


def _aval(of: Layout | None) -> Aval | None:
    return None if of is None else (of.size, of.dtype)
