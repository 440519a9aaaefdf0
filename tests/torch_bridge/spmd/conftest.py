"""Programs over several devices with sharding annotations, on virtual CPU devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

import torch_bridge.device.startup  # noqa: F401
from torch_bridge.mesh import spmd, world


@pytest.fixture
def mesh() -> Iterator[xs.Mesh]:
    """Eight devices as 4 x 2, axes "data" and "model"; annotations are on until the test has ended."""
    world.configure(world.World(8))
    xr.use_spmd()
    made = xs.Mesh(range(8), (4, 2), ("data", "model"))
    yield made
    spmd.stop()
    xs.meshes._GLOBAL.clear()
