"""Where everything lies in a drawing of one node, in pixels from the top left corner: shared by the HTML and the PNG picture."""

from __future__ import annotations

from dataclasses import dataclass

from nxd_jax.topology.placement import Cell, cells
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
