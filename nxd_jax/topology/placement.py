"""Where the chips of a node stand in a picture, and on which sides a link leaves each of them."""

from __future__ import annotations

from dataclasses import dataclass

from nxd_jax.topology.instances import Instance
from nxd_jax.topology.links import neighbours


@dataclass(frozen=True)
class Cell:
    """A chip in a picture; the flags say on which sides it has a link. At the rim a link leads round to the opposite side."""

    chip: int
    up: bool
    down: bool
    left: bool
    right: bool


def cells(instance: Instance) -> list[list[Cell]]:
    """The chips of a node by rows: a torus as its grid, a ring as two rows, the second running back."""
    rows = _rows(instance)
    deep, wide, table = len(rows), len(rows[0]), neighbours(instance)

    def linked(row: int, column: int, to_row: int, to_column: int) -> bool:
        """Whether a link joins neighbouring places, or the two ends of a line of more than two."""
        inside = 0 <= to_row < deep and 0 <= to_column < wide
        longer = (deep if to_column == column else wide) > 2
        return (inside or longer) and rows[to_row % deep][to_column % wide] in table[rows[row][column]]

    return [
        [
            Cell(chip, linked(r, c, r - 1, c), linked(r, c, r + 1, c), linked(r, c, r, c - 1), linked(r, c, r, c + 1))
            for c, chip in enumerate(row)
        ]
        for r, row in enumerate(rows)
    ]


def _rows(instance: Instance) -> list[list[int]]:
    size, grid = instance.chips_per_node, instance.grid
    if len(grid) == 2:
        return [list(range(row * grid[1], (row + 1) * grid[1])) for row in range(grid[0])]
    if size < 4 or size % 2:
        return [list(range(size))]
    return [list(range(size // 2)), list(range(size - 1, size // 2 - 1, -1))]
