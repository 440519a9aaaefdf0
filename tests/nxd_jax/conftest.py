"""Worlds of several ranks in this process, on 64 virtual CPU devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

Nxd = Callable[..., None]


@pytest.fixture
def nxd() -> Iterator[Nxd]:
    """`nxd(world, tp=1, pp=1, cp=1, ep=1)`: host a world of that many ranks and initialise parallel state; undone after the test."""
    import torch_bridge.torch_xla.distributed.xla_backend  # noqa: F401
    from nxd_jax.parallel_layers import parallel_state
    from torch_bridge.mesh import world

    def stop() -> None:
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()

    def start(size: int, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, **kwargs: Any) -> None:
        stop()
        world.configure(world.World(size))
        dist.init_process_group("xla")
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            **kwargs,
        )

    yield start
    stop()
    world.configure(None)
