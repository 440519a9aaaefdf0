"""`torch_xla.distributed.spmd.debugging`: pictures, in a terminal, of which device has which part of a tensor."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import numpy as np
import torch

from torch_bridge.torch_xla import runtime
from torch_bridge.torch_xla.distributed.spmd.xla_sharded_tensor import sharding_text, unwrap

__all__ = ["visualize_sharding", "visualize_tensor_sharding"]

_DIVIDED = re.compile(r"\{devices=\[([\d,]+)\]([\d,]+)( last_tile_dim_replicate)?\}")


def visualize_tensor_sharding(t: torch.Tensor, **options: Any) -> Any:
    """`visualize_tensor_sharding`: `visualize_sharding` of how a tensor lies. Raises ValueError for one without annotation that has not been computed yet."""
    return visualize_sharding(sharding_text(unwrap(t)), **options)


def visualize_sharding(sharding: str, use_color: bool = True, scale: float = 1.0, min_width: int = 9, max_width: int = 80) -> Any:
    """`visualize_sharding`: print which devices have which part of a tensor with one or two dims, and return the picture, a `rich.table.Table`.

    sharding: as XLA writes it, `torch_xla._XLAC._get_xla_sharding_spec(t)`. use_color: parts as colored blocks where the terminal has colors, else in boxes.
    scale: of the space around the names of devices; min_width: of a part, in characters, if it is not 9; max_width: of the picture. Dims that are not divided
    are left out of a tensor with more dims. Raises ValueError for text that is no sharding, and for more than two divided dims.
    """
    import rich.box
    import rich.console
    import rich.table

    parts = _parts(sharding)
    console = rich.console.Console(width=max_width, file=sys.stdout)
    colored = use_color and console.color_system is not None
    table = rich.table.Table(
        show_header=False,
        show_lines=not colored,
        padding=0,
        highlight=not colored,
        pad_edge=False,
        box=None if colored else rich.box.SQUARE,
    )
    for k, row in enumerate(parts):
        table.add_row(*(_cell(devices, _color(k * len(row) + j) if colored else None, scale, min_width) for j, devices in enumerate(row)))
    console.print(table, end="\n\n")
    return table


def _parts(sharding: str) -> list[list[int | list[int]]]:
    """By row and column of parts, the device that has it; several, as a list, if it has copies."""
    if sharding == "{replicated}":
        return [[list(range(runtime.global_runtime_device_count()))]]
    found = _DIVIDED.fullmatch(sharding)
    if found is None:
        raise ValueError(
            f"visualize_sharding: {sharding!r} is no sharding. Give torch_xla._XLAC._get_xla_sharding_spec(t) of an annotated tensor (xs.mark_sharding)"
        )
    tiles = [int(n) for n in found[1].split(",")]
    copies = tiles.pop() if found[3] else 1
    divided = [n for n in tiles if n > 1]
    if len(divided) > 2:
        raise ValueError(f"visualize_sharding shows two dims, {sharding} divides {len(divided)}")
    shape = tiles if len(tiles) <= 2 else divided
    rows, columns = [*shape, 1, 1][:2] if len(shape) != 1 else (1, shape[0])
    devices = np.array([int(n) for n in found[2].split(",")])
    assert math.prod([rows, columns, copies]) == devices.size, "a part for each device"
    return devices.reshape((rows, columns, copies) if found[3] else (rows, columns)).tolist()


def _cell(devices: int | list[int], color: str | None, scale: float, min_width: int) -> Any:
    import rich.align
    import rich.padding
    import rich.style

    text = f"{runtime.device_type()} {devices}"
    around = max(round(scale), 0)
    beside = max(around, (min_width - len(text) + 1) // 2) if min_width != 9 else around
    style = rich.style.Style(bgcolor=color, color="white") if color else rich.style.Style()
    return rich.padding.Padding(rich.align.Align(text, "center", vertical="middle"), (around, beside, around, beside), style=style)


def _color(number: int) -> str:
    """Neighbours differ."""
    return ("blue", "dark_green", "dark_red", "purple", "dark_cyan", "dark_orange3", "navy_blue", "deep_pink4")[number % 8]
