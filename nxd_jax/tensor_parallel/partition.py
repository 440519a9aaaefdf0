"""How a tensor is cut into parts, and the attributes of a parameter that say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nxd_jax.tensor_parallel import parallel_groups
from nxd_jax.tensor_parallel import scaled_steps as _scaled_steps  # noqa: F401 : gradient scalers look for what is marked here

UNMARKED = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1, "num_partitions": 1, "rank_ordering": None}
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


def indices_split_along_dim(tensor: torch.Tensor, dim: int, rank: int | torch.Tensor, num_partitions: int) -> torch.Tensor:
    """The positions along `dim` that part `rank` (a number or an int tensor) of `num_partitions` covers, as an int64 tensor."""
    part = divide(tensor.shape[dim], num_partitions)
    return torch.arange(part, device=tensor.device) + rank * part


class EmbeddingUtility:
    """Which rows of a vocabulary a rank holds: the first, and the one after the last."""

    @staticmethod
    def range_from_per_partition_vocab_size(per_partition_vocab_size: int, rank: int, world_size: int) -> tuple[Any, Any]:
        """The rows of a rank that holds `per_partition_vocab_size` of them."""
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[Any, Any]:
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
    marked = {name: getattr(tensor, name) for name in UNMARKED if hasattr(tensor, name)}
    if len(marked) == len(UNMARKED) and marked["tensor_model_parallel"] == is_parallel and marked["partition_dim"] == dim:
        return
    for name, value in marked.items():
        raise AssertionError(f"the parameter of shape {list(tensor.shape)} has a {name} already, {value}: its attributes are set once")
    parts = num_partitions if num_partitions != -1 else parallel_groups.size("tp")
    values = (is_parallel, dim, stride, parts, None if rank_ordering is None else list(rank_ordering))
    for name, value in zip(UNMARKED, values, strict=True):
        setattr(tensor, name, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: torch.Tensor) -> None:
    """Give a parameter the attributes of one that ranks do not share out, where it has none."""
    for name, value in UNMARKED.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: torch.Tensor, source_tensor: torch.Tensor) -> None:
    """Copy the attributes that `source_tensor` has."""
    for name in UNMARKED:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))
