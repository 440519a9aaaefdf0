"""What of a configuration says how a model lies on the ranks, and in which precision it computes."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import torch
from torch import nn

from nxd_jax.tensor_parallel import parallel_groups

logger = logging.getLogger("nxd_jax")


@dataclasses.dataclass(frozen=True)
class Options:
    """Attributes that a transformers configuration gets for these models, with what holds for those that it lacks.

    sequence_parallel_enabled: activations between parallel layers are cut along the sequence. qkv_linear, fuse_qkv: see `attention`. kv_shared_group_size:
    copies of each K/V head. use_flash_attention: blockwise attention; use_ring_attention: for context parallelism. transpose_nki_inputs: accepted.
    separate_documents: a row holds several documents, each from a position 0 on, and tokens see their own alone.
    params_dtype: of parameters; reduce_dtype: in which tensor-parallel ranks add up; both torch dtypes or their names.
    """

    sequence_parallel_enabled: bool = False
    qkv_linear: bool = False
    fuse_qkv: bool = True
    kv_shared_group_size: int = 1
    use_flash_attention: bool = False
    use_ring_attention: bool = False
    transpose_nki_inputs: bool = True
    separate_documents: bool = False
    params_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, config: Any) -> Options:
        """Those of a configuration."""
        given = {f.name: getattr(config, f.name) for f in dataclasses.fields(cls) if getattr(config, f.name, None) is not None}
        for name in ("params_dtype", "reduce_dtype"):
            if isinstance(given.get(name), str):
                given[name] = getattr(torch, given[name])
        return cls(**given)

    def linear(self, config: Any) -> dict[str, Any]:
        """Arguments of parallel linear layers: hidden states are [batch, length, hidden], or [length / tp, batch, hidden] with sequence parallelism."""
        return {
            "init_method": normal_init(config),
            "sequence_parallel_enabled": self.sequence_parallel_enabled,
            "sequence_dimension": 0,
            "dtype": self.params_dtype,
            "reduce_dtype": self.reduce_dtype,
        }


def normal_init(config: Any) -> Any:
    """N(0, `initializer_range`)."""
    return functools.partial(nn.init.normal_, mean=0.0, std=config.initializer_range)


def per_rank(config: Any, name: str) -> int:
    """A size of the configuration on one tensor-parallel rank. Raises ValueError if it does not divide."""
    size, tp = getattr(config, name), parallel_groups.size("tp")
    if size % tp:
        raise ValueError(f"{name}={size} of the model's config.json must be a multiple of tensor_model_parallel_size={tp}")
    return int(size // tp)


@functools.cache
def say_once(text: str) -> None:
    """Log a line, once in a process."""
    logger.info("%s", text)
