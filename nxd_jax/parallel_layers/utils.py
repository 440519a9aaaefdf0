"""`neuronx_distributed.parallel_layers.utils`: cutting tensors, marking parallel parameters, casting, and questions about the installation."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from nxd_jax.parallel_layers.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_size
from nxd_jax.tensor_parallel.casting import (
    autocast_dtype,
    cast_all,
    cast_if_autocast_enabled,
    cast_tensor,
    move_all_tensor_to_cpu,
    verify_casted_dtype,
)
from nxd_jax.tensor_parallel.parallel_groups import get_local_world_size
from nxd_jax.tensor_parallel.partition import (
    EmbeddingUtility,
    copy_tensor_model_parallel_attributes,
    divide,
    ensure_divisibility,
    get_padding_length,
    indices_split_along_dim,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
    split_tensor_along_dim,
    split_tensor_along_last_dim,
    split_tensor_along_second_dim,
)

__all__ = [
    "EmbeddingUtility",
    "autocast_dtype",
    "cast_all",
    "cast_if_autocast_enabled",
    "cast_tensor",
    "copy_tensor_model_parallel_attributes",
    "divide",
    "ensure_divisibility",
    "get_local_world_size",
    "get_padding_length",
    "get_tensor_model_parallel_size",
    "indices_split_along_dim",
    "is_pjrt_device",
    "is_torch_version_greater_than_2",
    "move_all_tensor_to_cpu",
    "move_model_to_device",
    "param_is_not_tensor_parallel_duplicate",
    "requires_init_pg_override",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
    "split_tensor_along_dim",
    "split_tensor_along_last_dim",
    "split_tensor_along_second_dim",
    "verify_casted_dtype",
]


def param_is_not_tensor_parallel_duplicate(param: torch.Tensor) -> bool:
    """Whether this rank counts a parameter: each counts its part of one that is shared out, and rank 0 one that all hold.

    In a process that hosts several ranks, a parameter that all hold gives a `RankBool` that is true for tensor parallel rank 0. As an `if` it is decided
    for all ranks alike, so a norm that is added up over the ranks afterwards counts such parameters once for each: a warning says so.
    """
    if getattr(param, "tensor_model_parallel", False):
        return True
    first = get_tensor_model_parallel_rank() == 0
    if isinstance(first, torch.SymBool):
        warnings.warn(
            "param_is_not_tensor_parallel_duplicate: this process runs the script once for several ranks, and an `if` on the answer holds for all of "
            "them. A sum over the tensor parallel ranks then counts parameters that all hold once for each rank; "
            "neuronx_distributed.parallel_layers.grads.get_grad_norm and clip_grad_norm count them once, and so does torchrun with one process per rank.",
            stacklevel=2,
        )
    return first


# -- the installation ------------------------------------------------------------------------------------


def move_model_to_device(model: torch.nn.Module, device: Any) -> None:
    """Deprecated name of `neuronx_distributed.utils.model_utils.move_model_to_device`."""
    warnings.warn(
        "parallel_layers.utils.move_model_to_device has moved: import it from neuronx_distributed.utils.model_utils",
        DeprecationWarning,
        stacklevel=2,
    )
    from nxd_jax.utils import model_utils

    model_utils.move_model_to_device(model, device)


def requires_init_pg_override() -> bool:
    """Whether torch.distributed must be patched for xla process groups: only torch 2.0 needed it."""
    return False


def is_pjrt_device() -> bool:
    """Whether the runtime is Neuron's PJRT (`PJRT_DEVICE=NEURON`)."""
    return os.environ.get("PJRT_DEVICE") == "NEURON"


def is_torch_version_greater_than_2() -> bool:
    """Whether torch is 2.0 or newer: always."""
    return True
