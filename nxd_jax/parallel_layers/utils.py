"""`neuronx_distributed.parallel_layers.utils`: cutting tensors, marking parallel parameters, casting, and questions about the installation."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from nxd_jax.parallel_layers.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_size
from torch_bridge.mesh import world

_DEFAULTS = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1, "num_partitions": 1, "rank_ordering": None}
"""What a parameter that nobody marked counts as."""


# -- sizes and parts -----------------------------------------------------------------------------------


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise AssertionError unless `numerator` divides by `denominator`."""
    if numerator % denominator:
        raise AssertionError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """The quotient of two numbers that divide; AssertionError if they do not."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def get_padding_length(numerator: int, denominator: int) -> int:
    """What to add to `numerator` for it to divide by `denominator`."""
    return -numerator % denominator


def split_tensor_along_dim(
    tensor: torch.Tensor, partition_dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """`num_partitions` equal parts of a tensor along a dim: views, or with `contiguous_split_chunks` tensors of their own.

    Of an xla tensor, `parts[rank]` is each rank's own part.
    """
    parts = torch.split(tensor, divide(tensor.shape[partition_dim], num_partitions), dim=partition_dim)
    return type(parts)(p.contiguous() for p in parts) if contiguous_split_chunks else parts


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """`split_tensor_along_dim` of the last dim."""
    return split_tensor_along_dim(tensor, -1, num_partitions, contiguous_split_chunks)


def split_tensor_along_second_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """`split_tensor_along_dim` of dim 1."""
    return split_tensor_along_dim(tensor, 1, num_partitions, contiguous_split_chunks)


def indices_split_along_dim(tensor: torch.Tensor, dim: int, rank: Any, num_partitions: int) -> torch.Tensor:
    """The positions along `dim` that part `rank` (a number or an int tensor) of `num_partitions` covers, as an int64 tensor."""
    part = divide(tensor.shape[dim], num_partitions)
    return torch.arange(part, device=tensor.device) + rank * part


class EmbeddingUtility:
    """Which rows of a vocabulary a rank holds: the first, and the one after the last."""

    @staticmethod
    def range_from_per_partition_vocab_size(per_partition_vocab_size: int, rank: Any, world_size: int) -> tuple[Any, Any]:
        """The rows of a rank that holds `per_partition_vocab_size` of them."""
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def range_from_global_vocab_size(global_vocab_size: int, rank: Any, world_size: int) -> tuple[Any, Any]:
        """The rows of a rank out of `world_size` that share `global_vocab_size`."""
        return EmbeddingUtility.range_from_per_partition_vocab_size(divide(global_vocab_size, world_size), rank, world_size)


# -- attributes of parameters --------------------------------------------------------------------------


def set_tensor_model_parallel_attributes(
    tensor: torch.Tensor,
    is_parallel: bool,
    dim: int,
    stride: int,
    num_partitions: int = -1,
    rank_ordering: Sequence[int] | None = None,
) -> None:
    """Mark a parameter with how tensor parallel ranks share it.

    Sets `tensor_model_parallel`, `partition_dim`, `partition_stride`, `num_partitions` (-1: the tensor parallel size) and `rank_ordering`. One that is marked
    with the same `is_parallel` and `dim` keeps its attributes. Raises AssertionError if one of them is set otherwise.
    """
    marked = {name: getattr(tensor, name) for name in _DEFAULTS if hasattr(tensor, name)}
    if len(marked) == len(_DEFAULTS) and marked["tensor_model_parallel"] == is_parallel and marked["partition_dim"] == dim:
        return
    for name, value in marked.items():
        raise AssertionError(f"the parameter of shape {list(tensor.shape)} has a {name} already, {value}: its attributes are set once")
    parts = num_partitions if num_partitions != -1 else get_tensor_model_parallel_size()
    values = (is_parallel, dim, stride, parts, None if rank_ordering is None else list(rank_ordering))
    for name, value in zip(_DEFAULTS, values, strict=True):
        setattr(tensor, name, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: torch.Tensor) -> None:
    """Give a parameter the attributes of one that ranks do not share out, where it has none."""
    for name, value in _DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: torch.Tensor, source_tensor: torch.Tensor) -> None:
    """Copy the attributes that `source_tensor` has."""
    for name in _DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


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


# -- casting ---------------------------------------------------------------------------------------------


def autocast_dtype() -> torch.dtype | None:
    """The dtype that autocast for xla (or for CUDA, which scripts switch on in its place) asks for; None if it is off."""
    for device in ("xla", "cuda"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


def cast_tensor(tensor: Any, from_dtype: torch.dtype = torch.float32, to_dtype: torch.dtype = torch.bfloat16) -> Any:
    """A tensor of one dtype in another; anything else as it is."""
    return tensor.to(to_dtype) if isinstance(tensor, torch.Tensor) and tensor.dtype == from_dtype else tensor


def cast_all(state: Any, from_dtype: torch.dtype = torch.float32, to_dtype: torch.dtype = torch.bfloat16) -> Any:
    """`cast_tensor` for all tensors in nested lists, tuples and dicts."""
    return tree_map(lambda x: cast_tensor(x, from_dtype, to_dtype), state)


def cast_if_autocast_enabled(*args: Any) -> tuple[Any, ...]:
    """The arguments, floating-point tensors among them in the dtype of autocast if it is on."""
    dtype = autocast_dtype()
    if dtype is None:
        return args
    return tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, args)


def verify_casted_dtype(value: Any) -> None:
    """Raise AssertionError if autocast is on and a floating-point tensor in `value` has another dtype than it asks for."""
    dtype = autocast_dtype()

    def check(x: Any) -> Any:
        if dtype is not None and isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != dtype:
            raise AssertionError(f"Datatype of tensor is expected to be {dtype}, got {x.dtype} instead, in one of shape {list(x.shape)}")
        return x

    tree_map(check, value)


def move_all_tensor_to_cpu(data: Any, convert: bool = True) -> Any:
    """`data` with the xla tensors in nested lists, tuples and dicts copied to the CPU; with `convert=False` as it is."""
    if not convert:
        return data
    return tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) and x.device.type == "xla" else x, data)


# -- the installation ------------------------------------------------------------------------------------


def get_local_world_size() -> int:
    """Ranks on this host."""
    return world.local_size()


def move_model_to_device(model: torch.nn.Module, device: Any) -> None:
    """Deprecated name of `neuronx_distributed.utils.model_utils.move_model_to_device`."""
    warnings.warn(
        "parallel_layers.utils.move_model_to_device has moved: import it from neuronx_distributed.utils.model_utils",
        DeprecationWarning,
        stacklevel=2,
    )
    importlib.import_module("nxd_jax.utils.model_utils").move_model_to_device(model, device)


def requires_init_pg_override() -> bool:
    """Whether torch.distributed must be patched for xla process groups: only torch 2.0 needed it."""
    return False


def is_pjrt_device() -> bool:
    """Whether the runtime is Neuron's PJRT (`PJRT_DEVICE=NEURON`)."""
    return os.environ.get("PJRT_DEVICE") == "NEURON"


def is_torch_version_greater_than_2() -> bool:
    """Whether torch is 2.0 or newer: always."""
    return True
