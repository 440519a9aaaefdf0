"""`torch_xla.experimental.distributed_checkpoint`: names that scripts with SPMD import; using them raises NotImplementedError."""

from __future__ import annotations

from typing import Any, NoReturn


def _later(name: str) -> NoReturn:
    raise NotImplementedError(
        f"torch_xla.experimental.distributed_checkpoint.{name}: sharded checkpoints of annotated models are not there yet. xm.save(model.state_dict(), path) "
        "writes whole tensors, and load_state_dict(torch.load(path)) leaves each divided as it is; models of ranks have nxd.save_checkpoint."
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
