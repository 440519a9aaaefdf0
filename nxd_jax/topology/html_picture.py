"""The topology as one self-contained piece of HTML, for notebooks: an SVG drawing per node and kind of group."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from nxd_jax.topology.layouts import Groups
from nxd_jax.topology.marks import colour, headline, kinds_to_show, label, marks, wires
from nxd_jax.topology.scene import Box, Line, Scene, scene

if TYPE_CHECKING:
    from nxd_jax.topology.topology import Topology

_STYLE = "font-family:system-ui,sans-serif;font-size:13px;color:#1b1f24;background:#fff;padding:12px;display:inline-block"
_MOST_NAMED = 16


def html(topology: Topology, groups: Groups | None = None, by: str | Sequence[str] | None = None, most_nodes: int = 8) -> str:
    """HTML with a drawing of the chips, their cores and links, cores coloured by group; hovering over a core names all its groups.

    Without `groups` (from `Topology.groups`) cores are coloured by chip. `by` chooses the kinds of groups, one drawing each (default: every
    kind that has several groups of several ranks). At most `most_nodes` nodes are drawn; the rest is mentioned.
    """
    kinds = kinds_to_show(groups, by)
    drawn = min(topology.node_count, most_nodes)
    parts = [f"<div><b>{escape(headline(topology))}</b><br>{escape(wires(topology))}</div>"]
    for kind in kinds or ("",):
        found = marks(groups, kind) if groups and kind else None
        if found:
            parts.append(_legend(kind, found))
        nodes = "".join(_node(topology, scene(topology, node), found, groups) for node in range(drawn))
        parts.append(f'<div style="display:flex;flex-wrap:wrap;gap:12px">{nodes}</div>')
    if drawn < topology.node_count:
        parts.append(f"<div>... and {topology.node_count - drawn} more nodes (most_nodes={most_nodes})</div>")
    return f'<div class="nxd-topology" style="{_STYLE}">{"".join(parts)}</div>'


def _legend(kind: str, found: dict[int, int]) -> str:
    numbers = sorted(set(found.values()))
    names = "".join(
        f'<span style="background:{colour(n)};border-radius:3px;padding:0 5px;margin-right:3px">{escape(label(kind))} {n}</span>'
        for n in numbers[:_MOST_NAMED]
    )
    more = f"... {len(numbers)} in all" if len(numbers) > _MOST_NAMED else ""
    return f'<div style="margin:10px 0 4px;max-width:720px;line-height:1.6">coloured by {escape(label(kind))}: {names}{more}</div>'


def _node(topology: Topology, drawing: Scene, found: dict[int, int] | None, groups: Groups | None) -> str:
    title = f"<div>node {drawing.node}</div>" if topology.node_count > 1 else ""
    shapes = [_line(points) for points in drawing.lines]
    shapes += [
        _rect(box, "#eef1f4", 5) + _text(box[0] + 5, box[1] + 12, f"chip {chip}", "start", 10) for chip, box in drawing.chips.items()
    ]
    for core in drawing.cores:
        number = core.chip if found is None else found[core.rank]
        x, y, width, height = core.box
        shapes.append(
            f"<g><title>{escape(_hover(topology, core.rank, groups))}</title>{_rect(core.box, colour(number), 2)}"
            f"{_text(x + width / 2, y + height / 2 + 4, str(core.rank), 'middle', 11)}</g>"
        )
    size = f'width="{drawing.width:g}" height="{drawing.height:g}" viewBox="0 0 {drawing.width:g} {drawing.height:g}"'
    return f'<div>{title}<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(shapes)}</svg></div>'


def _hover(topology: Topology, rank: int, groups: Groups | None) -> str:
    core = topology.cores[rank]
    lines = [f"rank {rank}", f"node {core.node}, chip {core.chip}, core {core.id} (physical {', '.join(map(str, core.physical))})"]
    for kind, members in (groups or {}).items():
        number = next(n for n, group in enumerate(members) if rank in group)
        lines.append(f"{kind} group {number}, rank {members[number].index(rank)} of {len(members[number])}")
    return "\n".join(lines)


def _rect(box: Box, fill: str, radius: int) -> str:
    x, y, width, height = box
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" fill="{fill}" stroke="#8a94a0"/>'


def _line(points: Line) -> str:
    x1, y1, x2, y2 = points
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="#5c6773" stroke-width="2"/>'


def _text(x: float, y: float, words: str, anchor: str, size: int) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="#1b1f24">{escape(words)}</text>'
