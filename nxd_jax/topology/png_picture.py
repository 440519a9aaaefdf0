"""The topology as a PNG file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nxd_jax.topology.layouts import Groups
from nxd_jax.topology.marks import colour, headline, kinds_to_show, label, marks, wires
from nxd_jax.topology.scene import Box, Scene, scene

if TYPE_CHECKING:
    from nxd_jax.topology.topology import Topology

_COLUMNS = 4
INCH = 90.0
"""Pixels of the scene per inch of the figure."""


def png(
    topology: Topology,
    path: str | os.PathLike[str],
    groups: Groups | None = None,
    by: str | Sequence[str] | None = None,
    most_nodes: int = 8,
    dpi: float = 144,
) -> None:
    """Write the drawing that `html` shows as a PNG file: one panel per node and kind of group, up to 4 side by side.

    Arguments as for `html`; `dpi` is dots per inch. Needs matplotlib: ImportError naming the extra that brings it if it is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("topology pictures as PNG need matplotlib; install it with: pip install 'nxd-jax[notebooks]'") from error
    kinds = kinds_to_show(groups, by) or ("",)
    drawings = [scene(topology, node) for node in range(min(topology.node_count, most_nodes))]
    panels = [(kind, drawing) for kind in kinds for drawing in drawings]
    columns = min(_COLUMNS, len(drawings) if len(drawings) > 1 else len(panels))
    rows = -(-len(panels) // columns)
    width, height = drawings[0].width / INCH, drawings[0].height / INCH + 0.3
    figure = Figure(figsize=(max(columns * width, 6) + 0.2, rows * height + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    hidden = topology.node_count - len(drawings)
    figure.suptitle(f"{headline(topology)}\n{wires(topology)}" + (f"; {hidden} more nodes not drawn" if hidden else ""), fontsize=8)
    axes = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    for axis in axes:
        axis.set_axis_off()
    for axis, (kind, drawing) in zip(axes, panels, strict=False):
        panel(axis, drawing, marks(groups, kind) if groups and kind else None)
        axis.set_title(_title(topology, kind, drawing.node), fontsize=8)
    figure.savefig(path, format="png", dpi=dpi)


def _title(topology: Topology, kind: str, node: int) -> str:
    parts = [f"node {node}"] * (topology.node_count > 1) + [f"by {label(kind)}"] * bool(kind)
    return ", ".join(parts)


def panel(axis: Any, drawing: Scene, found: dict[int, int] | None) -> None:
    """Draw a node on matplotlib axes, one unit a pixel of the scene. found: the number that colours each rank's core; None: that of its chip."""
    axis.set_xlim(0, drawing.width)
    axis.set_ylim(drawing.height, 0)
    axis.set_aspect("equal")
    for x1, y1, x2, y2 in drawing.lines:
        axis.plot([x1, x2], [y1, y2], color="#5c6773", linewidth=1.2, zorder=1)
    for chip, box in drawing.chips.items():
        axis.add_patch(_patch(box, "#eef1f4"))
        axis.text(box[0] + 5, box[1] + 12, f"chip {chip}", fontsize=6)
    for core in drawing.cores:
        x, y, width, height = core.box
        patch = _patch(core.box, colour(core.chip if found is None else found[core.rank]))
        patch.set_gid(f"rank {core.rank}")
        axis.add_patch(patch)
        axis.text(x + width / 2, y + height / 2, str(core.rank), ha="center", va="center", fontsize=6.5)


def _patch(box: Box, fill: str) -> Any:
    from matplotlib.patches import Rectangle

    x, y, width, height = box
    return Rectangle((x, y), width, height, facecolor=fill, edgecolor="#8a94a0", linewidth=0.8, zorder=2)
