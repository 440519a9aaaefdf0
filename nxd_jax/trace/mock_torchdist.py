"""torch.distributed for a block, for all ranks of a world in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from nxd_jax.tensor_parallel import parallel_groups
from torch_bridge.mesh import world


@contextlib.contextmanager
def mock_distributed(world_size: int) -> Iterator[None]:
    """`trace.mock_torchdist.mock_distributed`: within the block this process hosts a world of `world_size` ranks, and `init_process_group` starts it.

    Nothing is mocked: collectives work, on xla tensors. A process group that the block leaves behind is destroyed. Raises RuntimeError if torch.distributed is
    initialised already.
    """
    parallel_groups.forget_unasked()
    if dist.is_initialized():
        raise RuntimeError("mock_distributed needs torch.distributed not to be initialised: this job has real ranks, which serve as well")
    before = world.current()
    world.configure(world.World(world_size))
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        world.configure(before)
