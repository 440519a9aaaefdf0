"""Trainers lay out ranks; each test begins without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def ranks() -> Iterator[None]:
    """Undo afterwards what Trainers say about ranks."""
    from nxd_jax.parallel_layers import parallel_state
    from torch_bridge.mesh import world

    yield
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    world.configure(None)
