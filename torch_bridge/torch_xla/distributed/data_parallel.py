"""`torch_xla.distributed.data_parallel` (removed upstream): not provided."""

from __future__ import annotations


class DataParallel:
    """Raises NotImplementedError when constructed."""

    def __init__(self, *args: object, **kwargs: object):
        raise NotImplementedError(
            "torch_xla.distributed.data_parallel.DataParallel (several threads, one device each) was removed from torch_xla; use one "
            "worker per device "
            "with torch_xla.distributed.parallel_loader.MpDeviceLoader and xm.optimizer_step."
        )
