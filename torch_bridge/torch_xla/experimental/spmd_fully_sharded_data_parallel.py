"""`torch_xla.experimental.spmd_fully_sharded_data_parallel`: can be imported, not used."""

from __future__ import annotations

from torch import nn

from torch_bridge.torch_xla.distributed.spmd import ADVICE


class SpmdFullyShardedDataParallel(nn.Module):
    """Raises NotImplementedError when constructed."""

    def __init__(self, *args: object, **kwargs: object):
        raise NotImplementedError(
            f"torch_xla.experimental.spmd_fully_sharded_data_parallel.SpmdFullyShardedDataParallel: {ADVICE} In a world of one rank use the module itself."
        )
