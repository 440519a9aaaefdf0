"""`reshape`, which graphs use to read and write views of a storage (`layout.read_steps`). Scripts' own reshapes never arrive: torch makes them views."""

from __future__ import annotations

import torch

from torch_bridge.lowerings.registry import lowering
from torch_bridge.lowerings.types import Array, Shape

aten = torch.ops.aten


@lowering(aten.reshape.default, view=True)
def reshape(x: Array, shape: Shape) -> Array:
    return x.reshape(shape)
