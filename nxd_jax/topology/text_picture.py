"""The topology as text, much as `neuron-ls -t` shows it."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase
from typing import TYPE_CHECKING

from nxd_jax.topology.layouts import Groups
from nxd_jax.topology.marks import headline, kinds_to_show, label, marks, spans, wires
from nxd_jax.topology.placement import Cell, cells

if TYPE_CHECKING:
    from nxd_jax.topology.topology import Core, Topology

_MARGIN = "    "


def text(topology: Topology, groups: Groups | None = None, by: str | Sequence[str] | None = None) -> str:
    """A text picture: a table of the devices of a node with their neighbours, and the devices as boxes with their links.

    A box holds the device number, its core ids and, given `groups` (from `Topology.groups`), the numbers of the groups its cores belong to, for
    the kinds in `by` (default: every kind that has several groups of several ranks). Links that leave the picture carry a letter: equal
    letters are the two ends of one link. Several nodes are shown as one drawing and a line per node.
    """
    kinds = kinds_to_show(groups, by)
    by_kind = {kind: marks(groups, kind) for kind in kinds} if groups else {}
    first = [core for core in topology.cores if core.node == 0]
    several = topology.node_count > 1
    parts = [headline(topology), wires(topology), "", _devices(topology, first), ""]
    parts += _drawing(topology, _boxes(topology, first, {} if several else by_kind))
    if several:
        parts += ["", _nodes(topology, by_kind)]
    return "\n".join(parts)


def torus(topology: Topology) -> str:
    """The drawing of `text` alone: the devices of one node as boxes with their core ids, and the links between them."""
    return "\n".join(_drawing(topology, _boxes(topology, [core for core in topology.cores if core.node == 0], {})))


def _devices(topology: Topology, cores: list[Core]) -> str:
    """The table of one node's devices."""
    rows = [["DEVICE", "CORES", "CORE IDS", "MEMORY", "CONNECTED DEVICES"]]
    for chip, around in topology.connected_devices().items():
        ids = [core.id for core in cores if core.chip == chip]
        memory = f"{topology.chip.hbm_bytes // 2**30} GiB"
        rows.append([str(chip), str(len(ids)), spans(ids), memory, ", ".join(map(str, around)) or "-"])
    return _table(rows)


def _nodes(topology: Topology, by_kind: dict[str, dict[int, int]]) -> str:
    """The table of nodes: their ranks and which groups those are in."""
    joined = topology.instance.nodes > 1
    rows = [["NODE", *(["RING"] if joined else []), "RANKS", *(label(kind).upper() for kind in by_kind)]]
    for node in range(topology.node_count):
        ranks = range(node * topology.cores_per_node, (node + 1) * topology.cores_per_node)
        ring = [_ring(topology, node)] if joined else []
        rows.append([str(node), *ring, spans(ranks), *(spans(mark[r] for r in ranks) for mark in by_kind.values())])
    return _table(rows)


def _ring(topology: Topology, node: int) -> str:
    """The nodes whose chips this node's chips are wired to."""
    size = topology.instance.nodes
    start, place = node // size * size, node % size
    return f"{start + (place - 1) % size}, {start + (place + 1) % size}"


def _table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def _boxes(topology: Topology, cores: list[Core], by_kind: dict[str, dict[int, int]]) -> list[list[str]]:
    """For each device of a node the lines of its box."""
    boxes = []
    for chip in range(topology.instance.chips_per_node):
        mine = [core for core in cores if core.chip == chip]
        groups = [f"{label(kind)} {spans(mark[core.rank] for core in mine)}" for kind, mark in by_kind.items()]
        boxes.append([f"[{chip}]", f"cores {spans(core.id for core in mine)}", *(groups if mine else [""] * len(groups))])
    return boxes


def _drawing(topology: Topology, boxes: list[list[str]]) -> list[str]:
    """The boxes in their places with the links between them."""
    places = cells(topology.instance)
    width = max(len(line) for box in boxes for line in box) + 2
    letters = iter(ascii_lowercase)
    rim = [next(letters) if cell.up else " " for cell in places[0]]
    lines = _stubs(rim, width) + _stubs(["│" if cell.up else " " for cell in places[0]], width)
    for row in places:
        lines += _row(row, boxes, width, next(letters) if row[0].left else "")
        lines += _stubs(["│" if cell.down else " " for cell in row], width)
    return [line.rstrip() for line in lines + _stubs(rim, width)]


def _stubs(signs: list[str], width: int) -> list[str]:
    """A line with a sign above or below the middle of each box; nothing if all are blank."""
    line = _MARGIN + _MARGIN.join(sign.center(width + 2) for sign in signs)
    return [line] if line.strip() else []


def _row(row: list[Cell], boxes: list[list[str]], width: int, letter: str) -> list[str]:
    """One row of boxes. Links to the left and right leave at the device number; a letter marks one that leads round to the other end."""
    left, right = "─" * ((width - 1) // 2), "─" * (width - (width - 1) // 2 - 1)
    lines = [_MARGIN + _MARGIN.join("┌" + left + "─┴"[cell.up] + right + "┐" for cell in row)]
    for number in range(len(boxes[0])):
        wired = number == 0
        line = f" {letter}──" if wired and letter else _MARGIN
        for place, cell in enumerate(row):
            inside = boxes[cell.chip][number].center(width)
            line += "│┤"[wired and cell.left] + inside + "│├"[wired and cell.right]
            if place + 1 < len(row):
                line += "────" if wired and cell.right else _MARGIN
        lines.append(line + (f"──{letter}" if wired and letter else ""))
    return [*lines, _MARGIN + _MARGIN.join("└" + left + "─┬"[cell.down] + right + "┘" for cell in row)]
