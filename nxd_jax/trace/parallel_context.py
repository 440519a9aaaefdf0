"""A world of ranks for a block: where models are traced and checkpoints cut for all of them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from nxd_jax.parallel_layers import parallel_state
from nxd_jax.tensor_parallel import parallel_groups
from torch_bridge.mesh import world


class NxDParallelState:
    """`neuronx_distributed.NxDParallelState`: `with NxDParallelState(world_size=8, tensor_model_parallel_size=8):` parallel state is there within the block.

    This process hosts all `world_size` ranks; under torchrun, where torch.distributed is initialised, they are the job's. rank: accepted (a process that hosts
    all ranks is every one of them). Sizes as in `parallel_state.initialize_model_parallel`; lnc_size: logical cores per NeuronCore setting, kept.
    Raises RuntimeError if parallel state is set up already, or the job has another number of ranks.
    """

    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        lnc_size: int | None = None,
    ):
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be one of the {world_size} ranks of world_size, got {rank}")
        self.world_size = world_size
        self.rank = rank
        self.tensor_model_parallel_size = tensor_model_parallel_size
        self.pipeline_model_parallel_size = pipeline_model_parallel_size
        self.context_parallel_size = context_parallel_size
        self.expert_model_parallel_size = expert_model_parallel_size
        self.lnc_size = lnc_size
        self._started = False
        self._before: Any = None

    def __enter__(self) -> NxDParallelState:
        parallel_groups.forget_unasked()
        if parallel_state.model_parallel_is_initialized():
            raise RuntimeError(
                "NxDParallelState sets up parallel state, which is there already: leave the other block, or call destroy_model_parallel()"
            )
        if dist.is_initialized():
            if dist.get_world_size() != self.world_size:
                raise RuntimeError(
                    f"NxDParallelState(world_size={self.world_size}) in a job of {dist.get_world_size()} ranks: give that number"
                )
        else:
            self._before = world.current()
            world.configure(world.World(self.world_size))
            dist.init_process_group("xla")
            self._started = True
        try:
            more: dict[str, Any] = {} if self.lnc_size is None else {"lnc_size": self.lnc_size}
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=self.tensor_model_parallel_size,
                pipeline_model_parallel_size=self.pipeline_model_parallel_size,
                context_parallel_size=self.context_parallel_size,
                expert_model_parallel_size=self.expert_model_parallel_size,
                skip_collective_init=True,
                **more,
            )
        except BaseException:
            self._stop()
            raise
        parallel_state.set_aot_mode(True)
        return self

    def __exit__(self, *exc: object) -> None:
        parallel_state.set_aot_mode(False)
        parallel_state.destroy_model_parallel()
        self._stop()

    def _stop(self) -> None:
        if self._started:
            dist.destroy_process_group()
            world.configure(self._before)
            self._started = False
