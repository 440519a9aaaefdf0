"""`torch_xla.experimental.spmd_fully_sharded_data_parallel`: can be imported, not used."""

from __future__ import annotations

from typing import Any

from torch import nn


class SpmdFullyShardedDataParallel(nn.Module):
    """Raises NotImplementedError when constructed."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotImplementedError("SpmdFullyShardedDataParallel is not in this release; in a world of one worker use the module itself")
