"""What the pictures share: which mark and colour each core gets, and short ways to write lists of numbers."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from nxd_jax.topology.layouts import KINDS, Groups, informative

if TYPE_CHECKING:
    from nxd_jax.topology.topology import Topology

UNITS = (("TB/s", 1e12), ("GB/s", 1e9))


def kinds_to_show(groups: Groups | None, by: str | Sequence[str] | None) -> tuple[str, ...]:
    """The kinds of groups that a picture marks: those asked for, else every kind that has several groups of several ranks.

    A kind is "tp", "dp", "pp", "cp", "ep" or "edp" for the number of the group, or one of these with `_rank` for the place within the
    group ("pp_rank" is the pipeline stage). ValueError for another one, and for a kind without groups to take it from.
    """
    if by is None:
        return tuple(k for k in informative(groups) if len(groups[k]) > 1) if groups else ()
    asked = (by,) if isinstance(by, str) else tuple(by)
    unknown = [kind for kind in asked if kind.removesuffix("_rank") not in KINDS]
    if unknown:
        raise ValueError(f"by={by!r}: {unknown[0]!r} is no kind of group; use {', '.join(KINDS)}, or one of these with _rank")
    if asked and groups is None:
        raise ValueError(f"by={by!r} needs the groups to mark; pass groups=topology.groups(tp=..., pp=...)")
    return asked


def marks(groups: Groups, kind: str) -> dict[int, int]:
    """For each rank its mark: the number of its group, or with `<kind>_rank` its place within the group."""
    place = kind.endswith("_rank")
    return {rank: i if place else number for number, group in enumerate(groups[kind.removesuffix("_rank")]) for i, rank in enumerate(group)}


def label(kind: str) -> str:
    """How a picture writes the kind: "tp", or "pp rank" for "pp_rank"."""
    return kind.replace("_", " ")


def spans(numbers: Iterable[int], most: int = 4) -> str:
    """Numbers in short: [0, 1, 2, 5] -> "0-2,5"; after `most` pieces "...". Empty: "-"."""
    pieces: list[list[int]] = []
    for number in sorted(set(numbers)):
        if pieces and number == pieces[-1][-1] + 1:
            pieces[-1].append(number)
        else:
            pieces.append([number])
    written = [f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in pieces]
    return ",".join(written[:most] + ["..."] * (len(written) > most)) or "-"


def colour(number: int) -> str:
    """A light colour "#rrggbb", far from those of the neighbouring numbers, on which dark text is readable."""
    red, green, blue = colorsys.hls_to_rgb(number * 0.61803398875 % 1, 0.74 + 0.08 * (number % 3 - 1), 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def bandwidth(bytes_per_second: float) -> str:
    """ "256 GB/s" """
    unit, size = next((u for u in UNITS if bytes_per_second >= u[1]), UNITS[-1])
    return f"{bytes_per_second / size:.4g} {unit}"


def headline(topology: Topology) -> str:
    """One line on the machine: what it is, how many cores, what each core has."""
    instance, chip = topology.instance, topology.chip
    many = f"{topology.nodes} x " if topology.nodes > 1 else ""
    nodes = f" on {instance.nodes} nodes" if instance.nodes > 1 else ""
    return (
        f"{many}{instance.name}: {instance.chips} {chip.name} chip{'s' * (instance.chips > 1)}{nodes}{' each' * (topology.nodes > 1)}, "
        f"{topology.core_count} cores ({topology.device_kind}, LNC {topology.lnc}); "
        f"per core {topology.hbm_per_core / 2**30:g} GiB, {topology.peak_flops_per_core('bfloat16') / 1e12:.4g} TFLOP/s bfloat16"
    )


def wires(topology: Topology) -> str:
    """One line on the links: shape, bandwidths, network."""
    instance, chip = topology.instance, topology.chip
    if len(instance.grid) == 2:
        parts = [f"{instance.grid[0]}x{instance.grid[1]} torus, {bandwidth(chip.link_bandwidth)} per link"]
    elif instance.chips_per_node > 1:
        parts = [f"ring of {instance.grid[0]}, {bandwidth(chip.link_bandwidth)} per link"]
    else:
        parts = ["one chip, no links"]
    if instance.nodes > 1 and chip.z_link_bandwidth:
        parts.append(f"same chips of the {instance.nodes} nodes in a ring, {bandwidth(chip.z_link_bandwidth)} per link")
    if instance.efa_gbps:
        parts.append(f"EFA {instance.efa_gbps:g} Gbit/s per node")
    return "; ".join(parts)
