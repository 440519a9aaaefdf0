"""The collectives that scripts call on a wrapper, to add up what they compute of shards: a norm of their own, say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_bridge.fsdp.wrapper import XlaFullyShardedDataParallel
from torch_bridge.torch_xla.core import xla_model

OPERATIONS: dict[str, Callable[..., Any]] = {
    "all_reduce_op": xla_model.all_reduce,
    "all_gather_op": xla_model.all_gather,
    "reduce_scatter_op": xla_model.reduce_scatter,
    "optimization_barrier_op": xla_model.optimization_barrier_,
}
"""By method: `model.all_reduce_op(reduce_type, inputs, ...)` is `xm.all_reduce(reduce_type, inputs, ...)`."""


def install() -> None:
    """Give them to the wrapper."""
    for name, operation in OPERATIONS.items():
        setattr(XlaFullyShardedDataParallel, name, staticmethod(operation))
