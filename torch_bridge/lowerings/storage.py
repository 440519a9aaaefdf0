"""`reshape`, which graphs use to read and write views of a storage (`layout.read_steps`). Scripts' own reshapes never arrive: torch makes them views."""

from __future__ import annotations

from typing import Any

import torch

from torch_bridge.lowerings.registry import lowering

aten = torch.ops.aten


@lowering(aten.reshape.default)
def reshape(x: Any, shape: Any) -> Any:
    return x.reshape(shape)
