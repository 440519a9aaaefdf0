"""Rules of a segment that is cut into parts: each value is computed once, from what parts before give, and a buffer is free when its last reader runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_bridge.passes.cut_segment import Part
from torch_bridge.passes.verify import report
from torch_bridge.passes.verify.graphs import needed

AFTER = "cut_segment"


def check(parts: Sequence[Part], nodes: Sequence[tuple[Any, ...]], outs: Sequence[int]) -> None:
    """Raise `VerificationError` for the first rule that the parts of these nodes and results break."""
    given = [v for part in parts for v in part.results]
    if len(given) != len(set(given)) or not set(outs) <= set(given):
        report.fail(AFTER, "every value that is needed is the result of one part", f"{given[:8]} for {list(outs)[:8]}")
    known: set[int] = set()
    done: dict[int, int] = {}
    reads: list[set[int]] = []
    for k, part in enumerate(parts):
        if not part.given <= known:
            report.fail(AFTER, "a part takes values of parts before it", f"part {k} takes {sorted(part.given - known)[:8]}")
        known.update(part.results)
        computed, taken = needed(nodes, part.results, part.given)
        twice = next((i for i in computed if done.setdefault(i, k) != k), None)
        if twice is not None:
            found = f"{nodes[twice][0].op} in part {done[twice]} and part {k}"
            report.fail(AFTER, "a node is computed in one part", found)
        reads.append({-v - 1 for v in taken if v < 0})
    for k, part in enumerate(parts):
        later = reads[k].intersection(set().union(*reads[k + 1 :]))
        if not later <= part.shared:
            report.fail(AFTER, "a part takes over no leaf that a later one reads", f"part {k}, leaf {min(later - part.shared)}")
