"""`neuronx_distributed_training.lightning_modules.model.megatron_init`: seeds, for ranks that are laid out."""

from __future__ import annotations

from typing import Any

from nxd_jax.tensor_parallel import parallel_groups
from nxd_jax.training.seeding import seed_everything

__all__ = ["initialize_model_parallel_for_nemo"]


def initialize_model_parallel_for_nemo(
    world_size: int,
    global_rank: Any,
    local_rank: Any,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = 1,
    pipeline_model_parallel_split_rank: int | None = None,
    micro_batch_size: int | None = None,
    global_batch_size: int | None = None,
    seed: int | None = None,
) -> None:
    """Seed all random numbers (None: 1234), once ranks are laid out as the sizes say. `BaseModelModule` does that itself.

    The original also fills NeMo's AppState, which nothing here reads: ranks, split rank and batch sizes have no effect.

    Raises ValueError if ranks are not laid out, or otherwise than the sizes say.
    """
    asked = {"tp": tensor_model_parallel_size, "pp": pipeline_model_parallel_size, "cp": context_parallel_size}
    if not parallel_groups.initialized():
        raise ValueError(
            "initialize_model_parallel_for_nemo: ranks are not laid out yet; call neuronx_distributed_config and initialize_model_parallel first"
        )
    found = {name: parallel_groups.size(name) for name in asked}
    if found != asked:
        raise ValueError(f"initialize_model_parallel_for_nemo: the sizes {asked} differ from those that ranks are laid out with, {found}")
    seed_everything(1234 if seed is None else seed)
