"""How a global batch is shared out: over data-parallel ranks, and on each in micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from omegaconf import DictConfig

from nxd_jax.training.utils.utils import get_attribute_from_cfg


@dataclass(frozen=True)
class BatchSizes:
    """Rows: `global_batch_size` of a step, `micro_batch_size` of a micro-batch. dp_size: data-parallel ranks."""

    global_batch_size: int
    micro_batch_size: int
    dp_size: int

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a step on each data-parallel rank."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    @property
    def per_rank(self) -> int:
        """Rows of a step on each data-parallel rank."""
        return self.global_batch_size // self.dp_size

    @classmethod
    def of(cls, cfg: DictConfig, world_size: int) -> BatchSizes:
        """From a configuration and the number of ranks. Raises ValueError where they do not divide. (The original rounds down.)"""
        sizes = parallel_sizes(cfg)
        shared = math.prod(sizes.values())
        said = ", ".join(f"{_SIZES[name]}={size}" for name, size in sizes.items())
        if world_size % shared:
            raise ValueError(
                f"{world_size} ranks (trainer.devices * trainer.num_nodes) cannot be divided by {said}: they must be a multiple of {shared}"
            )
        found = cls(int(cfg.data.global_batch_size), int(cfg.data.micro_batch_size), world_size // shared)
        unit = found.micro_batch_size * found.dp_size
        if found.global_batch_size % unit or not found.global_batch_size:
            low = found.global_batch_size // unit * unit
            near = f"{low} or {low + unit}" if low else f"{unit}"
            raise ValueError(
                f"data.global_batch_size={found.global_batch_size} must be a multiple of data.micro_batch_size={found.micro_batch_size} times "
                f"{found.dp_size} data-parallel ranks ({world_size} ranks, {said}), {near} for example"
            )
        return found


def parallel_sizes(cfg: DictConfig) -> dict[str, int]:
    """tp, pp and cp of a configuration: their product is the ranks that share one copy of the model."""
    return {name: int(get_attribute_from_cfg(cfg, f"distributed_strategy.{key}", 1) or 1) for name, key in _SIZES.items()}


_SIZES = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size"}
