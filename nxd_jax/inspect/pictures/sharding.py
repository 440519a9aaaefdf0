"""Which core holds which slice of a tensor, drawn."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nxd_jax.inspect.pictures.blocks import Block, Slices, slices
from nxd_jax.inspect.pictures.figures import INK, MUTED, checked, figure, finished, rectangle
from nxd_jax.topology.marks import colour, spans

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_PANELS = 6
_SIDE = 5.0
_MOST = 14.0
_LEAST = 1.3, 0.5
_ROW, _COLUMN = 0.17, 0.12
_FONTS = (9.0, 8.0, 7.0, 6.0, 5.0)
_TICKS = 9


def sharding_picture(tensor: Any, name: str = "", shape: Sequence[int] | None = None, path: str | os.PathLike[str] | None = None) -> Figure:
    """A tensor as blocks, drawn to scale, each with the ranks that hold it, and coloured by them.

    Two dims are drawn: those that are split, and if only one is, the largest of the others beside it. Dims that are whole in every block are named and not
    drawn; if more than two dims are split, the others make panels. A side that would be too thin to read is drawn thicker, and the picture says so.

    Args:
        tensor: a tensor or parameter on xla, a `jax.Array`, or a `jax.sharding.NamedSharding` together with `shape`; `slices` gives the same as data.
        name: how to call it.
        shape: of the global tensor, for a sharding alone.
        path: of a .png, .svg or .pdf file to save the figure in.

    Raises what `slices` does, and ValueError for a path with another ending.
    """
    target = checked(path)
    found = slices(tensor, shape)
    drawn = _drawn(found)
    panels = _panels(found, drawn)
    sizes = [found.shape[d] for d in drawn]
    width, height, true = _inches(sizes, [found.counts[d] for d in drawn])
    shown = panels[:MOST_PANELS]
    columns = min(len(shown), 3)
    rows = -(-len(shown) // columns)
    made = figure(max(columns * (width + 1.0), 4.5), rows * (height + 0.75) + 0.9)
    axes = made.subplots(rows, columns, squeeze=False).reshape(-1)
    left_out = sum(_panel(axis, found, drawn, panel, (width, height)) for axis, panel in zip(axes, shown, strict=False))
    for axis in axes[len(shown) :]:
        axis.set_axis_off()
    made.suptitle(_title(found, name), fontsize=10)
    notes = [
        *([] if true else ["sides are not to scale"]),
        *([f"{left_out} labels left out, for the blocks are too small"] if left_out else []),
        *([f"{len(panels) - len(shown)} more panels not drawn"] if len(panels) > len(shown) else []),
    ]
    made.supxlabel("; ".join([_whole(found, drawn), *notes]).strip("; "), fontsize=8, color=MUTED)
    return finished(made, target)


# -- what is drawn -----------------------------------------------------------------------------------


def _drawn(found: Slices) -> list[int]:
    """The dims that are drawn: [down, across], or [across] alone."""
    dims = range(len(found.shape))
    cut = [d for d in dims if found.counts[d] > 1]
    by_size = sorted((d for d in dims if d not in cut), key=lambda d: -found.shape[d])
    return sorted([*cut, *by_size][:2])


def _panels(found: Slices, drawn: list[int]) -> list[list[Block]]:
    """The blocks by their place along the dims that are not drawn."""
    by_place: dict[tuple[int, ...], list[Block]] = {}
    for block in found.blocks:
        by_place.setdefault(tuple(s for d, s in enumerate(block.start) if d not in drawn), []).append(block)
    return list(by_place.values())


def _inches(sizes: Sequence[int], counts: Sequence[int]) -> tuple[float, float, bool]:
    """Width and height of the drawing, and whether they are to scale."""
    columns = min(_COLUMN * counts[-1], _MOST) if counts else 0.0
    if len(sizes) < 2:
        return max(_SIDE, columns), _LEAST[1], True
    down, across = max(sizes[0], 1), max(sizes[1], 1)
    width, height = _SIDE * across / max(down, across), _SIDE * down / max(down, across)
    fitted = max(width, _LEAST[0], columns), max(height, _LEAST[1], min(_ROW * counts[0], _MOST))
    return *fitted, math.isclose(fitted[0] * height, fitted[1] * width, rel_tol=0.01)


def _title(found: Slices, name: str) -> str:
    inner, ranks = list(found.blocks[0].shape), found.ranks
    copies = " or ".join(map(str, sorted({len(block.ranks) for block in found.blocks})))
    whole = f"{name} {list(found.shape)}".strip()
    if len(found.blocks) == 1:
        return f"{whole}\nwhole on {f'each of {ranks} ranks' if ranks > 1 else 'one rank'}"
    alike = len({block.shape for block in found.blocks}) == 1
    return f"{whole}\n{len(found.blocks)} blocks{f' of {inner}' if alike else ''}, each on {copies} of {ranks} ranks"


def _whole(found: Slices, drawn: Sequence[int]) -> str:
    """The dims that are neither drawn nor split."""
    dims = [f"{d} ({found.shape[d]})" for d in range(len(found.shape)) if d not in drawn and found.counts[d] == 1]
    return f"dim{'s' * (len(dims) > 1)} {', '.join(dims)} whole in every block" if dims else ""


# -- drawing -----------------------------------------------------------------------------------------


def _panel(axis: Any, found: Slices, drawn: Sequence[int], blocks: Sequence[Block], inches: tuple[float, float]) -> int:
    """Draw blocks; how many of them are too small for their label."""
    across = max(found.shape[drawn[-1]], 1) if drawn else 1
    down = max(found.shape[drawn[0]], 1) if len(drawn) > 1 else 1
    numbers = {ranks: i for i, ranks in enumerate(dict.fromkeys(block.ranks for block in found.blocks))}
    labels = []
    for block in blocks:
        x, width = _extent(block, drawn[-1] if drawn else None)
        y, height = _extent(block, drawn[0] if len(drawn) > 1 else None)
        patch = rectangle(x, y, width, height, facecolor=colour(numbers[block.ranks]), edgecolor="#5c6773", linewidth=0.8)
        patch.set_gid("block " + ",".join(map(str, block.start)))
        axis.add_patch(patch)
        text = short(block.ranks)
        labels.append((x + width / 2, y + height / 2, text, _fitted(text, width / across * inches[0], height / down * inches[1])))
    looks = [look for _, _, _, look in labels if look]
    for x, y, text, look in labels:
        if look:
            size, turned = min(size for size, _ in looks), max(turned for _, turned in looks)
            axis.text(x, y, text, ha="center", va="center", fontsize=size, rotation=turned, color=INK)
    axis.set_xlim(0, across)
    axis.set_ylim(down, 0)
    axis.set_box_aspect(inches[1] / inches[0])
    axis.tick_params(labelsize=7)
    axis.spines[:].set_visible(False)
    _side(axis.set_xlabel, axis.set_xticks, found, drawn[-1] if drawn else None, inches[0])
    _side(axis.set_ylabel, axis.set_yticks, found, drawn[0] if len(drawn) > 1 else None, inches[1])
    rest = [d for d in range(len(found.shape)) if d not in drawn and found.counts[d] > 1]
    if rest:
        first = blocks[0]
        axis.set_title(", ".join(f"dim {d}: {first.start[d]}-{first.stop[d] - 1} ({_over(found, d)})" for d in rest), fontsize=8)
    return len(labels) - len(looks)


def _extent(block: Block, dim: int | None) -> tuple[float, float]:
    """Where a block starts along a dim, and how long it is. Without that dim it is 1 long."""
    return (0, 1) if dim is None else (block.start[dim], max(block.shape[dim], 1))


def _side(set_label: Any, set_ticks: Any, found: Slices, dim: int | None, inches: float) -> None:
    """Label a side of this length with its dim and the borders of the blocks."""
    if dim is None:
        set_ticks([])
        return
    size, count = found.shape[dim], found.counts[dim]
    step = -(-count // _TICKS)
    starts = sorted({block.start[dim] for block in found.blocks})
    set_ticks(sorted({*(start for i, start in enumerate(starts) if i % step == 0 and count - i >= step), size}))
    parts = [f"dim {dim} ({size})", *([f"split over {_over(found, dim)}"] if count > 1 else [])]
    label = ", ".join(parts)
    set_label(label if _fitted(label, inches, 1) else "\n".join(parts), fontsize=8)


def _over(found: Slices, dim: int) -> str:
    return " x ".join(found.axes[dim])


def _fitted(text: str, width: float, height: float) -> tuple[float, int] | None:
    """The largest font in which a text fits into a box of these inches, upright or turned by 90 degrees; None if it does not."""
    for size in _FONTS:
        long, tall = len(text) * size * 0.62 / 72, size * 1.15 / 72
        if long <= width and tall <= height:
            return size, 0
        if long <= height and tall <= width:
            return size, 90
    return None


def short(ranks: Sequence[int]) -> str:
    """Ranks in short: "0-7", "0,8,16,24", with equal steps "0,8,..,56", else as `marks.spans`."""
    steps = {b - a for a, b in itertools.pairwise(ranks)}
    if len(ranks) > 4 and len(steps) == 1 and steps != {1}:
        return f"{ranks[0]},{ranks[1]},..,{ranks[-1]}"
    return spans(ranks)
