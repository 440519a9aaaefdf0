"""`torch.distributed.optim.ZeroRedundancyOptimizer` chooses a rank's parameters in Python, so ranks of one process would all train the first one's."""

from __future__ import annotations

from torch_bridge.collectives import askers

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"
"""Importing it takes a second: it is not patched."""
_DEPTH = 8
"""Frames between a group that is asked for its rank and who asks."""


def refuse() -> None:
    """Raises NotImplementedError where such an optimizer, which is being made, asks a group of several ranks which one it is."""
    if askers.frame_of(_MODULE, _DEPTH) is not None:
        raise NotImplementedError(
            "torch.distributed.optim.ZeroRedundancyOptimizer gives each rank parameters of its own in Python, and all ranks run one program here: use "
            "torch_xla.distributed.zero_redundancy_optimizer.ZeroRedundancyOptimizer, which divides every parameter"
        )
