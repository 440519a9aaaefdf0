"""The machine with its groups, and what a step carries over each link."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nxd_jax.inspect import units
from nxd_jax.inspect.pictures.figures import INK, MUTED, checked, figure, finished
from nxd_jax.topology import Groups, Link, Topology
from nxd_jax.topology.marks import colour, headline, kinds_to_show, label, marks, spans, wires
from nxd_jax.topology.png_picture import INCH, panel
from nxd_jax.topology.scene import Scene, scene, ways

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NODES = 4
_LIGHT, _DARK = (253, 204, 138), (127, 0, 0)
_THIN, _WIDE = 1.6, 9.0
_NAMED = 8
_GREY = "#5c6773"


class Carried(Protocol):
    """What `nxd_jax.inspect.traffic.Traffic` says, in bytes per step."""

    @property
    def links(self) -> Mapping[tuple[int, Link], float]:
        """(instance, link): over it, both directions together."""

    @property
    def network(self) -> Mapping[int, float]:
        """node: what it sends over EFA."""

    @property
    def local(self) -> Mapping[tuple[int, int], float]:
        """(instance, chip): between the cores of the chip."""


def topology_picture(
    topology: Topology,
    groups: Groups | None = None,
    by: str | Sequence[str] | None = None,
    traffic: Carried | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """The chips of every node (of the first 4) on their torus or ring, with cores coloured by group and links as wide and dark as what they carry.

    Links that wrap around are stubs of one look on opposite sides; slanted stubs lead to the next node of an UltraServer (to the right) and to the one before
    (to the left). A number in a chip is what its own cores send one another.

    Args:
        topology: the machine.
        groups: `Topology.groups(tp=..., pp=...)`; without them cores are coloured by chip.
        by: the kind or kinds of groups to colour by, a panel each: "tp", "dp", "pp", "cp", "ep", "edp", or one of these with `_rank`. Default: every kind that
            has several groups of several ranks.
        traffic: bytes per step over links, network and within chips (`nxd_jax.inspect.traffic`).
        path: of a .png, .svg or .pdf file to save the figure in.

    Raises ValueError for an unknown kind, for one without groups, for traffic over links or nodes that the machine does not have, and for a path with another
    ending.
    """
    target = checked(path)
    kinds = kinds_to_show(groups, by) or ("",)
    if traffic is not None:
        _require(topology, traffic)
    drawings = [scene(topology, node) for node in range(min(topology.node_count, MOST_NODES))]
    panels = [(kind, drawing) for kind in kinds for drawing in drawings]
    columns = len(drawings) if len(drawings) > 1 else min(len(panels), 3)
    rows = -(-len(panels) // columns)
    below = 0.3 + (0.55 if groups else 0.0)
    width, height = drawings[0].width / INCH, drawings[0].height / INCH + below
    made = figure(max(columns * (width + 0.15), 7.0), rows * height + (1.3 if traffic else 0.55))
    axes = made.subplots(rows, columns, squeeze=False).reshape(-1)
    most = max(traffic.links.values(), default=0.0) if traffic else 0.0
    for axis, (kind, drawing) in zip(axes, panels, strict=False):
        found = marks(groups, kind) if groups and kind else None
        panel(axis, drawing, found)
        axis.set_title(_title(topology, kind, drawing.node, traffic), fontsize=8.5)
        if found:
            _groups(axis, kind, found, [core.rank for core in drawing.cores])
        if traffic:
            _traffic(axis, topology, drawing, traffic, most)
    for axis in axes:
        axis.set_axis_off()
    made.suptitle("\n".join(_heading(topology, len(drawings), traffic)), fontsize=8.5)
    if traffic:
        _legend(made, topology, traffic, most)
    return finished(made, target)


def _require(topology: Topology, traffic: Carried) -> None:
    known, chips, nodes = set(topology.links()), topology.instance.chips, topology.node_count
    wrong = [
        f"link {i}: {link.chips[0]}-{link.chips[1]}" for i, link in traffic.links if link not in known or i not in range(topology.nodes)
    ]
    wrong += [f"chip {i}: {chip}" for i, chip in traffic.local if chip not in range(chips) or i not in range(topology.nodes)]
    wrong += [f"node {node}" for node in traffic.network if node not in range(nodes)]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"the traffic is not that of {topology!r}, which has no {', '.join(wrong[:3])}{more}; give the topology it was worked out for"
        )


# -- words -------------------------------------------------------------------------------------------


def _heading(topology: Topology, drawn: int, traffic: Carried | None) -> list[str]:
    hidden = topology.node_count - drawn
    lines = [headline(topology), wires(topology) + (f"; {hidden} more nodes not drawn" if hidden else "")]
    if traffic:
        every = len(topology.links()) * topology.nodes
        used = sum(1 for carried in traffic.links.values() if carried)
        parts = [f"{units.size(sum(traffic.links.values()))} over {used} of {every} NeuronLinks"] if every else []
        if local := sum(traffic.local.values()):
            parts.append(f"{units.size(local)} within chips")
        if network := sum(traffic.network.values()):
            parts.append(f"{units.size(network)} over EFA")
        lines.append("a step carries " + (", ".join(parts) or "nothing"))
    return lines


def _title(topology: Topology, kind: str, node: int, traffic: Carried | None) -> str:
    parts = [*([f"node {node}"] if topology.node_count > 1 else []), *([f"cores by {label(kind)}"] if kind else [])]
    if traffic and any(traffic.network.values()):
        parts.append(f"sends {units.size(traffic.network.get(node, 0.0))} over EFA")
    return ", ".join(parts)


def _groups(axis: Axes, kind: str, found: Mapping[int, int], ranks: Sequence[int]) -> None:
    """Below a node: the colours of the groups that have ranks on it."""
    from matplotlib.patches import Patch

    members: dict[int, list[int]] = {}
    for rank in ranks:
        members.setdefault(found[rank], []).append(rank)
    named = sorted(members)[:_NAMED]
    handles: list[Any] = [Patch(facecolor=colour(n), edgecolor=_GREY, label=f"{label(kind)} {n}: {spans(members[n])}") for n in named]
    if len(members) > len(named):
        handles.append(Patch(fill=False, linewidth=0, label=f"and {len(members) - len(named)} more"))
    columns = 4 if max(len(h.get_label()) for h in handles) < 13 else 3 if len(axis.patches) > 40 else 2
    axis.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.02),
        ncols=columns,
        fontsize=6.5,
        frameon=False,
        handlelength=1.2,
        columnspacing=1.0,
    )


# -- links -------------------------------------------------------------------------------------------


def _traffic(axis: Axes, topology: Topology, drawing: Scene, traffic: Carried, most: float) -> None:
    """The links of a node over their thin lines, and in each chip what its cores send one another."""
    which = drawing.node // topology.instance.nodes
    for way in ways(topology, drawing):
        carried = traffic.links.get((which, way.link), 0.0)
        for x1, y1, x2, y2 in way.lines:
            shade, width = look(carried, most)
            name = f"link {which}: {way.link.chips[0]}-{way.link.chips[1]}"
            axis.plot([x1, x2], [y1, y2], color=shade, linewidth=width, solid_capstyle="butt", zorder=1.5, gid=name)
    first = drawing.node % topology.instance.nodes * topology.instance.chips_per_node
    for chip, (x, y, width, _) in drawing.chips.items():
        if local := traffic.local.get((which, first + chip)):
            axis.text(x + width - 4, y + 12, brief(local), ha="right", fontsize=5.2, color=MUTED, gid=f"local {chip}")


def look(carried: float, most: float) -> tuple[str, float]:
    """Colour and width in points of a link that carries some of the bytes of the busiest one; thin and grey without any."""
    if not carried or not most:
        return _GREY, 1.0
    part = carried / most
    shade = "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(_LIGHT, _DARK, strict=True))
    return f"#{shade}", _THIN + (_WIDE - _THIN) * part


def brief(count: float) -> str:
    """Bytes in at most 8 characters: 13107200 -> "12.5 MiB"."""
    number, unit = units.size(count).split()
    value = float(number)
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def levels(carried: Sequence[float]) -> list[float]:
    """Bytes to show in the legend, the most first: all that occur if they are few, else the extremes and what lies between."""
    found = sorted({c for c in carried if c}, reverse=True)
    if len(found) <= 4:
        return found
    most, least = found[0], found[-1]
    return [most, most - (most - least) / 3, least + (most - least) / 3, least]


def _legend(made: Figure, topology: Topology, traffic: Carried, most: float) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for carried in levels(list(traffic.links.values())):
        shade, width = look(carried, most)
        handles.append(Line2D([], [], color=shade, linewidth=width, solid_capstyle="butt", label=f"{units.size(carried)} a step"))
    if sum(1 for c in traffic.links.values() if c) < len(topology.links()) * topology.nodes:
        handles.append(Line2D([], [], color=_GREY, linewidth=1.0, label="a link without traffic"))
    if handles:
        title = "bytes over a link, both directions together" + ("; in a chip: between its cores" if any(traffic.local.values()) else "")
        title += "; slanted: to the next node (right), to the one before (left)" if topology.instance.nodes > 1 else ""
        fitting = max(1, int(made.get_figwidth() / 1.9))
        legend = made.legend(
            handles=handles,
            loc="outside lower center",
            ncols=min(len(handles), fitting),
            fontsize=8,
            frameon=False,
            title=title,
            handlelength=3,
        )
        legend.get_title().set(fontsize=8, color=INK)
