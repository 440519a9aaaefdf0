"""Python numbers that are constants of programs become inputs when they change between steps: the starts of slices (`data[i : i + 32]`) above all.

Steps that are alike but for such numbers have one `signature`. When a second one is recorded, the families (`ir.number_families`) of the ops that differ
become dynamic (`learn`), and are recorded so from then on. What was recorded before that, or is played from a recording, is rewritten (`apply`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_bridge.ir import number_families
from torch_bridge.ir.segment import Segment
from torch_bridge.source import Source

Nodes = Sequence[tuple[Any, ...]]


def signature(nodes: Nodes) -> tuple[tuple[Any, ...], ...] | None:
    """What nodes have in common with those that differ in numbers alone; None if none of them has any."""
    if all(node[0].family is None for node in nodes):
        return None
    return tuple((number_families.alike(node[0]), *node[1:]) for node in nodes)


def learn(segment: Segment, nodes: Nodes, sources: Sequence[Source]) -> bool:
    """Make the families dynamic whose numbers in a segment are others than in nodes of the same signature; whether there were any.

    Only ops that come from the same line of the script count: others just happen to be alike.
    """
    learned = False
    for node, before, here, there in zip(segment.nodes, nodes, segment.sources, sources, strict=False):
        family = node[0].family
        if node[0] is not before[0] and family is not None and not family.dynamic and (here.file, here.line) == (there.file, there.line):
            family.dynamic = learned = True
    return learned


def apply(segment: Segment) -> bool:
    """Have ops of dynamic families take their numbers as inputs; whether there were any that did not."""
    if segment.capture:
        return False
    nodes, numbers = number_families.as_recorded_now(segment.nodes)
    if not numbers:
        return False
    segment.nodes = nodes
    segment.numbers = sorted([*segment.numbers, *numbers.items()], key=lambda of: of[0])
    segment.predicted = None
    return True
