"""Slices whose start differs between steps (`data[i : i + 32]`) take it as an input, so that all of them share a program.

Steps that are alike but for the starts of slices have one `signature`. When a second one is recorded, the families of the slices that differ become dynamic
(`learn`), and are recorded so from then on. What was recorded before that, or is played from a recording, is rewritten (`apply`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_bridge.ir import slice_families
from torch_bridge.ir.segment import Segment
from torch_bridge.source import Source

Nodes = Sequence[tuple[Any, ...]]


def signature(nodes: Nodes) -> tuple[tuple[Any, ...], ...] | None:
    """What nodes have in common with those that differ in the starts of slices alone; None if nothing in them has one."""
    if all(node[0].family is None for node in nodes):
        return None
    return tuple((slice_families.alike(node[0]), *node[1:]) for node in nodes)


def learn(segment: Segment, nodes: Nodes, sources: Sequence[Source]) -> bool:
    """Make the families dynamic whose slices start elsewhere in a segment than in nodes of the same signature; whether there were any.

    Only slices that come from the same line of the script count: others just happen to be alike.
    """
    learned = False
    for node, before, here, there in zip(segment.nodes, nodes, segment.sources, sources, strict=False):
        family = node[0].family
        if node[0] is not before[0] and family is not None and not family.dynamic and (here.file, here.line) == (there.file, there.line):
            family.dynamic = learned = True
    return learned


def apply(segment: Segment) -> bool:
    """Have slices of dynamic families take their start as an input; whether there were any that did not."""
    if segment.capture:
        return False
    starts: dict[int, tuple[int, ...]] = {}
    for i, node in enumerate(segment.nodes):
        family = node[0].family
        if family is not None and family.dynamic and family.entry is not node[0]:
            starts[i] = node[0].start
    if not starts:
        return False
    segment.nodes = [(node[0].family.entry, *node[1:]) if i in starts else node for i, node in enumerate(segment.nodes)]
    segment.numbers = sorted([*segment.numbers, *starts.items()], key=lambda numbers: numbers[0])
    segment.predicted = None
    return True
