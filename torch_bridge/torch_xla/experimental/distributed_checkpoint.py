"""`torch_xla.experimental.distributed_checkpoint`: names that scripts with SPMD import; using them raises NotImplementedError."""

from __future__ import annotations

from typing import Any, NoReturn


def _later(name: str) -> NoReturn:
    raise NotImplementedError(
        f"torch_xla.experimental.distributed_checkpoint.{name}: checkpoints of SPMD models are not there yet. Use nxd.save_checkpoint and nxd.load_checkpoint "
        "(neuronx_distributed), or xm.save of a state_dict."
    )


class CheckpointManager:
    """`CheckpointManager`."""

    def __init__(self, *args: object, **kwargs: object):
        _later("CheckpointManager")


class SPMDLoadPlanner:
    """`SPMDLoadPlanner`."""

    def __init__(self, *args: object, **kwargs: object):
        _later("SPMDLoadPlanner")


class SPMDSavePlanner:
    """`SPMDSavePlanner`."""

    def __init__(self, *args: object, **kwargs: object):
        _later("SPMDSavePlanner")


def prime_optimizer(*args: object, **kwargs: object) -> Any:
    """`prime_optimizer`."""
    _later("prime_optimizer")
