"""Where everything lies in a drawing of one node, in pixels from the top left corner: shared by the HTML and the PNG picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nxd_jax.topology.links import Link
from nxd_jax.topology.placement import Cell, cells

if TYPE_CHECKING:
    from nxd_jax.topology.topology import Topology

Box = tuple[float, float, float, float]
"""x, y, width, height."""

Line = tuple[float, float, float, float]
"""x1, y1, x2, y2."""

_CORE, _GAP, _PAD, _TITLE, _WIRE = 26.0, 4.0, 6.0, 16.0, 22.0


@dataclass(frozen=True)
class CoreBox:
    """A core's place: `rank` and `chip` as in `topology.Core`."""

    rank: int
    chip: int
    box: Box


@dataclass(frozen=True)
class Scene:
    """A drawing of one node.

    Attributes:
        node: the node.
        width: pixels.
        height: pixels.
        chips: the box of each chip.
        cores: the boxes of the cores in use.
        lines: links; those that wrap around are two stubs that leave the grid on opposite sides.
    """

    node: int
    width: float
    height: float
    chips: dict[int, Box]
    cores: list[CoreBox]
    lines: list[Line]


def scene(topology: Topology, node: int) -> Scene:
    """The drawing of one node: chips as `placement.cells` puts them, the cores of a chip in rows of two (of four if it has eight)."""
    rows = cells(topology.instance)
    across = min(topology.cores_per_chip, 4 if topology.cores_per_chip > 4 else 2)
    deep = topology.cores_per_chip // across
    width = 2 * _PAD + across * _CORE + (across - 1) * _GAP
    height = _TITLE + _PAD + deep * _CORE + (deep - 1) * _GAP
    chips: dict[int, Box] = {}
    lines: list[Line] = []
    for r, row in enumerate(rows):
        for c, cell in enumerate(row):
            box = (_WIRE + c * (width + _WIRE), _WIRE + r * (height + _WIRE), width, height)
            chips[cell.chip] = box
            lines += _stubs(cell, box)
    cores = []
    for core in topology.cores:
        if core.node == node:
            x, y = chips[core.chip][:2]
            down, right = divmod(core.index, across)
            box = (x + _PAD + right * (_CORE + _GAP), y + _TITLE + down * (_CORE + _GAP), _CORE, _CORE)
            cores.append(CoreBox(core.rank, core.chip, box))
    size = _WIRE + len(rows[0]) * (width + _WIRE), _WIRE + len(rows) * (height + _WIRE)
    return Scene(node, *size, chips, cores, lines)


def _stubs(cell: Cell, box: Box) -> list[Line]:
    """A stub of wire on each linked side of a chip: between two chips the stubs meet, at the rim they stay open."""
    x, y, width, height = box
    middle_x, middle_y, half = x + width / 2, y + height / 2, _WIRE / 2
    sides = {
        (middle_x, y - half, middle_x, y): cell.up,
        (middle_x, y + height, middle_x, y + height + half): cell.down,
        (x - half, middle_y, x, middle_y): cell.left,
        (x + width, middle_y, x + width + half, middle_y): cell.right,
    }
    return [line for line, linked in sides.items() if linked]


# -- single links ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """Where a link is in the drawing of a node.

    Attributes:
        link: the link.
        lines: one from chip to chip, or two stubs on opposite sides where it wraps around, or a slanted stub where it leads to another node.
    """

    link: Link
    lines: tuple[Line, ...]


def ways(topology: Topology, drawing: Scene) -> list[Way]:
    """Where each link of a drawn node is, those to other nodes of an UltraServer included."""
    size = topology.instance.chips_per_node
    here = drawing.node % topology.instance.nodes
    places = {cell.chip: (r, c) for r, row in enumerate(cells(topology.instance)) for c, cell in enumerate(row)}
    found = []
    for link in topology.links():
        nodes, chips = [chip // size for chip in link.chips], [chip % size for chip in link.chips]
        if nodes[0] == nodes[1] == here:
            found.append(Way(link, _between(drawing, chips, places)))
        elif here in nodes and nodes[0] != nodes[1]:
            other = nodes[1 - nodes.index(here)]
            found.append(Way(link, (_slanted(drawing.chips[chips[0]], other == (here + 1) % topology.instance.nodes),)))
    return found


def _between(drawing: Scene, chips: list[int], places: dict[int, tuple[int, int]]) -> tuple[Line, ...]:
    """A link of two chips of one node, which stand in one row or in one column."""
    first, second = sorted(chips, key=places.__getitem__)
    (x1, y1, width, height), (x2, y2) = drawing.chips[first], drawing.chips[second][:2]
    middle_x, middle_y, stub = x1 + width / 2, y1 + height / 2, 0.8 * _WIRE
    (row, column), (to_row, to_column) = places[first], places[second]
    if row == to_row:
        if to_column - column == 1:
            return ((x1 + width, middle_y, x2, middle_y),)
        return (x1 - stub, middle_y, x1, middle_y), (x2 + width, middle_y, x2 + width + stub, middle_y)
    if to_row - row == 1:
        return ((middle_x, y1 + height, middle_x, y2),)
    return (middle_x, y1 - stub, middle_x, y1), (middle_x, y2 + height, middle_x, y2 + height + stub)


def _slanted(box: Box, to_next: bool) -> Line:
    """A stub from the upper right corner of a chip to the next node, or from the upper left one to the node before."""
    x, y, width, _ = box
    reach = 0.36 * _WIRE
    return (x + width, y, x + width + reach, y - reach) if to_next else (x, y, x - reach, y - reach)
